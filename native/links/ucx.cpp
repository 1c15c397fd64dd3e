// UCX (openucx.org): tag-matched messages of libucp. Its library is opened at run time, so the few
// types that cross its interface are declared here, as UCX 1.10 and later have them.
#include <poll.h>

#include <cstddef>

#include "links/messages.h"

namespace ts {
namespace {

using Status = int8_t;  // ucs_status_t
constexpr Status kOk = 0;
constexpr Status kInProgress = 1;
constexpr intptr_t kLastError = -100;  // a "status pointer" from here to -1 is an error
constexpr int kSleepMs = 5;
constexpr uint64_t kWholeTag = ~uint64_t{0};

/// ucp_request_param_t without any field set: bytes, no callback.
struct alignas(8) Parameters {
  uint32_t mask = 0;
  uint8_t unused[252] = {};
};

/// In the order in which parallel/links/ucx.py looks them up.
struct Functions {
  void* (*send)(void* endpoint, const void* data, size_t bytes, uint64_t tag, const Parameters*);
  void* (*receive)(void* worker, void* data, size_t bytes, uint64_t tag, uint64_t tag_mask,
                   const Parameters*);
  void* (*flush)(void* worker, const Parameters*);
  unsigned (*progress)(void* worker);
  Status (*check)(void* request);
  void (*free)(void* request);
  void (*cancel)(void* worker, void* request);
  Status (*arm)(void* worker);
};
static_assert(sizeof(Functions) == sizeof(EngineRecord::functions));

class Ucx : public Engine {
 public:
  explicit Ucx(const EngineRecord& record)
      : Engine(record), call_(reinterpret_cast<const Functions&>(record_.functions)) {}

  bool send(int32_t to, const void* data, int64_t bytes, Request* request) override {
    return keep(call_.send(record_.peers[to], data, bytes, tag(record_.rank), &parameters_),
                request);
  }

  bool receive(int32_t from, void* data, int64_t bytes, Request* request) override {
    request->is_receive = true;
    void* const result =
        call_.receive(record_.world, data, bytes, tag(from), kWholeTag, &parameters_);
    return keep(result, request);
  }

  bool flush(Request* request) override {
    return !keep(call_.flush(record_.world, &parameters_), request) || !request->is_done;
  }

  Progress poll(Request* request) override {
    if (request->handle == nullptr) return Progress::Failed;
    const Status status = call_.check(request->handle);
    if (status == kInProgress) return Progress::Pending;
    call_.free(request->handle);
    request->handle = nullptr;
    return status == kOk ? Progress::Done : Progress::Failed;
  }

  /// What was sent cannot be cancelled: that memory is only read, until the worker is destroyed.
  void cancel(Request* request) override {
    if (request->handle == nullptr) return;
    if (request->is_receive) {
      call_.cancel(record_.world, request->handle);
      while (call_.check(request->handle) == kInProgress) call_.progress(record_.world);
    }
    call_.free(request->handle);
  }

  void work(bool may_sleep) override {
    if (call_.progress(record_.world) != 0 || !may_sleep || record_.event_fd < 0) return;
    if (call_.arm(record_.world) != kOk) return;  // something happened meanwhile
    pollfd event{record_.event_fd, POLLIN, 0};
    ::poll(&event, 1, kSleepMs);
  }

 private:
  uint64_t tag(int32_t from) const {
    return (static_cast<uint64_t>(record_.tag) << 32) | static_cast<uint32_t>(from);
  }

  /// Stores a pointer that stands for a status or a request; returns false for an error.
  static bool keep(void* result, Request* request) {
    const auto status = reinterpret_cast<intptr_t>(result);
    request->is_done = status == kOk;
    request->handle = status >= kLastError && status <= kOk ? nullptr : result;
    return request->is_done || request->handle != nullptr;
  }

  const Functions& call_;
  const Parameters parameters_;
};

}  // namespace

Engine* make_ucx(const EngineRecord& record) { return new Ucx(record); }

}  // namespace ts
