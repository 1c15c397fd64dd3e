// Threads and memory on machines with several memory nodes: where each of them is kept.
#pragma once

#ifdef __linux__
#include <sched.h>
#endif

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ts {

/// A memory node and the threads of a team that keep to its cores: those that follow the threads of
/// the nodes before it. Crosses the C interface as in src/twostroke/backends/cpu/records.py.
struct NodeRecord {
  const int32_t* cores;
  int32_t num_cores;
  int32_t number;  // the operating system's
  int32_t num_threads;
};

#ifdef __linux__
using CoreSet = cpu_set_t;
#else
struct CoreSet {};  // threads are not bound there
#endif

/// The nodes over which a team's threads are spread; none on most machines, and then nothing here
/// asks the operating system for anything. Whatever it refuses is left as it was.
class Nodes {
 public:
  Nodes(const NodeRecord* records, int32_t num_nodes);

  bool none() const { return numbers_.empty(); }

  /// The cores that `thread` keeps to; only if there are nodes.
  const CoreSet& cores_of(int thread) const {
    return cores_[static_cast<size_t>(node_of_[static_cast<size_t>(thread)])];
  }

  /// Spreads mapped memory that no thread has touched yet evenly over the nodes.
  void interleave(void* memory, int64_t num_bytes) const;

 private:
  std::vector<int32_t> numbers_;
  std::vector<CoreSet> cores_;
  std::vector<int32_t> node_of_;  // each thread: index into the others
};

/// Keeps the thread that makes it to its node's cores, as far as it may use them, and gives it back
/// the cores that it had.
class Stay {
 public:
  Stay(const Nodes& nodes, int thread);
  ~Stay();
  Stay(const Stay&) = delete;
  Stay& operator=(const Stay&) = delete;

 private:
  bool is_bound_ = false;
  CoreSet before_;
};

}  // namespace ts
