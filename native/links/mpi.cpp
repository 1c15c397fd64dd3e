// MPI: messages between two ranks by the library that mpi4py has opened. Its handles are integers
// in some libraries and pointers in others; both fit into a pointer, and are passed alike.
#include <climits>
#include <ctime>

#include "links/messages.h"

namespace ts {
namespace {

constexpr int64_t kEager = 16384;       // up to here a message is not waited for
constexpr timespec kNap = {0, 20'000};  // 20 µs

/// In the order in which parallel/links/mpi.py looks them up. All return 0 if they succeed.
struct Functions {
  int (*send)(const void* data, int count, void* type, int to, int tag, void* world,
              void** request);
  int (*send_matched)(const void* data, int count, void* type, int to, int tag, void* world,
                      void** request);  // ends once it is being received
  int (*receive)(void* data, int count, void* type, int from, int tag, void* world, void** request);
  int (*test)(void** request, int* is_done, void* status);
  int (*cancel)(void** request);
  int (*free)(void** request);
};
static_assert(sizeof(Functions) <= sizeof(EngineRecord::functions));

class Mpi : public Engine {
 public:
  explicit Mpi(const EngineRecord& record)
      : Engine(record), call_(reinterpret_cast<const Functions&>(record_.functions)) {}

  bool send(int32_t to, const void* data, int64_t bytes, Request* request) override {
    return bytes <= INT_MAX && call_.send(data, static_cast<int>(bytes), record_.byte_type, to,
                                          record_.tag, record_.world, &request->handle) == 0;
  }

  bool receive(int32_t from, void* data, int64_t bytes, Request* request) override {
    request->is_receive = true;
    return bytes <= INT_MAX && call_.receive(data, static_cast<int>(bytes), record_.byte_type, from,
                                             record_.tag, record_.world, &request->handle) == 0;
  }

  bool flush(Request* /*request*/) override { return false; }

  Progress poll(Request* request) override {
    int is_done = 0;
    if (call_.test(&request->handle, &is_done, record_.ignored_status) != 0) {
      return Progress::Failed;
    }
    return is_done != 0 ? Progress::Done : Progress::Pending;
  }

  /// What was sent cannot be cancelled: that memory is only read.
  void cancel(Request* request) override {
    if (request->is_receive) call_.cancel(&request->handle);
    call_.free(&request->handle);
  }

  void work(bool may_sleep) override {  // testing a request makes MPI work
    if (may_sleep) nanosleep(&kNap, nullptr);
  }

 private:
  const Functions& call_;
};

}  // namespace

Engine* make_mpi(const EngineRecord& record) { return new Mpi(record); }

}  // namespace ts
