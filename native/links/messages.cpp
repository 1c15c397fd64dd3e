// Collectives by messages: each member sends its part to every other one. Teams are small, and one
// trip between two hosts takes longer than anything that a ring or a tree could save.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "links/ucx.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ts {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(400);

class Messages {
 public:
  /// Forgets all that was before. Only while no collective runs.
  void connect(const UcxRecord& record) {
    ucx_ = std::make_unique<Ucx>(record);
    record_ = record;
    failed_ = false;
    aborted_.store(false);
  }

  int32_t all_gather(const int32_t* team, int32_t size, const void* own, void* all,
                     const int64_t* bytes) {
    uint8_t* part = static_cast<uint8_t*>(all);
    int64_t own_bytes = 0;
    for (int32_t i = 0; i < size; ++i) {
      if (team[i] == record_.rank) {
        own_bytes = bytes[i];
        if (own_bytes > 0 && part != own) std::memmove(part, own, own_bytes);
      } else if (bytes[i] > 0) {
        add_receive(team[i], part, bytes[i]);
      }
      part += bytes[i];
    }
    for (int32_t i = 0; i < size; ++i) {
      if (team[i] != record_.rank && own_bytes > 0) add_send(team[i], own, own_bytes);
    }
    return finish();
  }

  int32_t send(int32_t to, const void* data, int64_t bytes) {
    add_send(to, data, bytes);
    return finish();
  }

  int32_t receive(int32_t from, void* data, int64_t bytes) {
    add_receive(from, data, bytes);
    return finish();
  }

  void abort() { aborted_.store(true); }
  int64_t progress() const { return progress_.load(); }

 private:
  void add_send(int32_t to, const void* data, int64_t bytes) {
    if (!failed_) add(ucx_->send(to, data, bytes, &next()));
  }
  void add_receive(int32_t from, void* data, int64_t bytes) {
    if (!failed_) add(ucx_->receive(from, data, bytes, &next()));
  }
  Request& next() { return requests_.emplace_back(Request{nullptr, false, false}); }
  void add(bool is_posted) {
    if (is_posted) return;
    requests_.pop_back();
    failed_ = true;
  }

  /// Waits for all requests. After a failure each later call fails, too: messages of a step that
  /// was given up must not be taken for those of another.
  int32_t finish() {
    progress_.fetch_add(1);
    if (!failed_ && wait() && ucx_->flush(&next())) wait();
    if (failed_) {
      for (Request& request : requests_) {
        if (!request.is_done) ucx_->cancel(&request);
      }
    }
    requests_.clear();
    progress_.fetch_add(1);
    return failed_ ? 1 : 0;
  }

  bool wait() {
    const auto start = Clock::now();
    bool may_sleep = false;
    while (!failed_) {
      bool is_pending = false;
      for (Request& request : requests_) {
        if (request.is_done) continue;
        const Progress progress = ucx_->poll(&request);
        request.is_done = progress == Progress::Done;
        is_pending |= progress == Progress::Pending;
        failed_ |= progress == Progress::Failed;
      }
      if (!is_pending) break;
      failed_ |= aborted_.load(std::memory_order_relaxed) || is_peer_lost();
      if (ucx_->work(may_sleep)) progress_.fetch_add(2);
      may_sleep = may_sleep || Clock::now() - start > kSpin;
    }
    return !failed_;
  }

  bool is_peer_lost() const {
    for (int32_t i = 0; i < record_.num_ranks; ++i) {
      if (__atomic_load_n(&record_.lost[i], __ATOMIC_RELAXED) != 0) return true;
    }
    return false;
  }

  UcxRecord record_{};
  std::unique_ptr<Ucx> ucx_;
  std::vector<Request> requests_;
  bool failed_ = true;  // until it is connected
  std::atomic<bool> aborted_{false};
  std::atomic<int64_t> progress_{0};
};

Messages* messages(void* context) { return static_cast<Messages*>(context); }

}  // namespace
}  // namespace ts

using ts::messages;

TS_EXPORT void* ts_messages_create() { return new ts::Messages; }
TS_EXPORT void ts_messages_connect(void* context, const ts::UcxRecord* record) {
  messages(context)->connect(*record);
}
TS_EXPORT void ts_messages_destroy(void* context) { delete messages(context); }
/// Ends the collective that waits, and each later one, with an error. Any thread may call it.
TS_EXPORT void ts_messages_abort(void* context) { messages(context)->abort(); }
/// A number that changes when a collective begins or ends and when bytes move; odd inside one.
TS_EXPORT int64_t ts_messages_progress(void* context) { return messages(context)->progress(); }

// The functions of a LinkRecord.
TS_EXPORT int32_t ts_messages_all_gather(void* context, const int32_t* team, int32_t size,
                                         const void* own, void* all, const int64_t* bytes) {
  return messages(context)->all_gather(team, size, own, all, bytes);
}
TS_EXPORT int32_t ts_messages_send(void* context, int32_t to, const void* data, int64_t bytes) {
  return messages(context)->send(to, data, bytes);
}
TS_EXPORT int32_t ts_messages_receive(void* context, int32_t from, void* data, int64_t bytes) {
  return messages(context)->receive(from, data, bytes);
}
/// UCX calls this when the connection to a rank breaks; `lost` is that rank's number in `lost`.
TS_EXPORT void ts_messages_lose(void* lost, void* /*endpoint*/, int8_t status) {
  __atomic_store_n(static_cast<int32_t*>(lost), status, __ATOMIC_RELAXED);
}
