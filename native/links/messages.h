// Moves the values of collectives between hosts: messages of an engine that exists (UCX, MPI), sent
// and received by plain C calls, so that no collective waits for Python.
#pragma once

#include <atomic>
#include <cstdint>

namespace ts {

enum class EngineKind : int32_t { Ucx = 0, Mpi = 1 };
enum class Progress { Done, Pending, Failed };

constexpr int kEngineFunctions = 8;

/// An opened engine. src/twostroke/parallel/links/record.py mirrors this layout.
struct EngineRecord {
  EngineKind kind;
  int32_t rank;
  int32_t num_ranks;
  int32_t tag;                        // of this connection's messages; others are left alone
  int32_t event_fd;                   // becomes readable when something happens; -1: none
  void* world;                        // UCX: the worker; MPI: the communicator
  void* const* peers;                 // UCX: the endpoint of each rank
  const int32_t* lost;                // of each rank: not 0 once its connection broke
  void* functions[kEngineFunctions];  // of the engine's library; each kind has its own list
  void* byte_type;                    // MPI_BYTE
  void* ignored_status;               // MPI_STATUS_IGNORE
};

/// One message on its way.
struct Request {
  void* handle;
  bool is_receive;
  bool is_done;
};

/// What collectives need of an engine. Only one thread at a time calls it.
class Engine {
 public:
  explicit Engine(const EngineRecord& record) : record_(record) {}
  virtual ~Engine() = default;
  virtual bool send(int32_t to, const void* data, int64_t bytes, Request* request) = 0;
  virtual bool receive(int32_t from, void* data, int64_t bytes, Request* request) = 0;
  /// Begins to wait until all that was sent has left this process; false if nothing is needed.
  virtual bool flush(Request* request) = 0;
  virtual Progress poll(Request* request) = 0;
  /// A request that was given up: its memory is not written to after this.
  virtual void cancel(Request* request) = 0;
  /// Lets the engine work; with `may_sleep`, waits up to some milliseconds for an event.
  virtual void work(bool may_sleep) = 0;

 protected:
  EngineRecord record_;
};

Engine* make_ucx(const EngineRecord& record);
Engine* make_mpi(const EngineRecord& record);

}  // namespace ts
