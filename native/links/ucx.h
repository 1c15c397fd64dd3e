// UCX (openucx.org): tag-matched messages of libucp, by plain C calls, so that no collective waits
// for Python. Its library is opened at run time, so the few types that cross its interface are
// declared here, as UCX 1.10 and later have them.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>

namespace ts {

constexpr int kUcxFunctions = 8;

/// An opened worker. src/twostroke/backends/parallel/links/ucx.py mirrors this layout.
struct UcxRecord {
  int32_t rank;
  int32_t num_ranks;
  int32_t event_fd;                // becomes readable when something happens
  void* worker;                    // what sends and receives
  void* const* endpoints;          // of each rank
  const int32_t* lost;             // of each rank: not 0 once its connection broke
  void* functions[kUcxFunctions];  // of the library, in the order of `Ucx::Functions`
};

enum class Progress { Done, Pending, Failed };

/// One message on its way.
struct Request {
  void* handle;
  bool is_receive;
  bool is_done;
};

/// What collectives need of UCX. Only one thread at a time calls it.
class Ucx {
 public:
  explicit Ucx(const UcxRecord& record)
      : record_(record), call_(reinterpret_cast<const Functions&>(record_.functions)) {}

  bool send(int32_t to, const void* data, int64_t bytes, Request* request) {
    return keep(call_.send(record_.endpoints[to], data, bytes, static_cast<uint64_t>(record_.rank),
                           &parameters_),
                request);
  }

  bool receive(int32_t from, void* data, int64_t bytes, Request* request) {
    request->is_receive = true;
    void* const result = call_.receive(record_.worker, data, bytes, static_cast<uint64_t>(from),
                                       kWholeTag, &parameters_);
    return keep(result, request);
  }

  /// Begins to wait until all that was sent has left this process; false if nothing is needed.
  bool flush(Request* request) {
    return !keep(call_.flush(record_.worker, &parameters_), request) || !request->is_done;
  }

  Progress poll(Request* request) {
    if (request->handle == nullptr) return Progress::Failed;
    const Status status = call_.check(request->handle);
    if (status == kInProgress) return Progress::Pending;
    call_.free(request->handle);
    request->handle = nullptr;
    return status == kOk ? Progress::Done : Progress::Failed;
  }

  /// Gives a request up; then nothing writes to its memory. What was sent cannot be cancelled: that
  /// memory is only read, until the worker is destroyed.
  void cancel(Request* request) {
    if (request->handle == nullptr) return;
    if (request->is_receive) {
      call_.cancel(record_.worker, request->handle);
      while (call_.check(request->handle) == kInProgress) call_.progress(record_.worker);
    }
    call_.free(request->handle);
  }

  /// Lets UCX work; returns whether anything happened. With `may_sleep`, waits up to some
  /// milliseconds for an event if nothing did.
  bool work(bool may_sleep) {
    if (call_.progress(record_.worker) != 0) return true;
    if (!may_sleep || record_.event_fd < 0) return false;
    if (call_.arm(record_.worker) == kOk) {  // else something happens now
      pollfd event{record_.event_fd, POLLIN, 0};
      ::poll(&event, 1, kSleepMs);
    }
    return false;
  }

 private:
  using Status = int8_t;  // ucs_status_t
  static constexpr Status kOk = 0;
  static constexpr Status kInProgress = 1;
  static constexpr intptr_t kLastError = -100;  // a "status pointer" from here to -1 is an error
  static constexpr int kSleepMs = 5;
  static constexpr uint64_t kWholeTag = ~uint64_t{0};

  /// ucp_request_param_t without any field set: bytes, no callback.
  struct alignas(8) Parameters {
    uint32_t mask = 0;
    uint8_t unused[252] = {};
  };

  /// In the order in which backends/parallel/links/ucx.py looks them up.
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
  static_assert(sizeof(Functions) == sizeof(UcxRecord::functions));

  /// Stores a pointer that stands for a status or a request; returns false for an error.
  static bool keep(void* result, Request* request) {
    const auto status = reinterpret_cast<intptr_t>(result);
    request->is_done = status == kOk;
    request->handle = status >= kLastError && status <= kOk ? nullptr : result;
    return request->is_done || request->handle != nullptr;
  }

  const UcxRecord record_;
  const Functions& call_;
  const Parameters parameters_;
};

}  // namespace ts
