// Binds threads to cores and spreads memory, by Linux's own calls.
#include "nodes.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ts {

Nodes::Nodes(const NodeRecord* records, int32_t num_nodes) {
  for (int32_t node = 0; node < num_nodes; ++node) {
    const NodeRecord& record = records[node];
    numbers_.push_back(record.number);
    node_of_.insert(node_of_.end(), static_cast<size_t>(record.num_threads), node);
    CoreSet cores = {};
#ifdef __linux__
    for (int32_t i = 0; i < record.num_cores; ++i) {
      if (record.cores[i] < CPU_SETSIZE) CPU_SET(record.cores[i], &cores);
    }
#endif
    cores_.push_back(cores);
  }
}

#ifdef __linux__

void Nodes::interleave(void* memory, int64_t num_bytes) const {
  constexpr int kInterleave = 3;     // as in linux/mempolicy.h, which not every system has
  constexpr size_t kNumbers = 1024;  // no kernel knows more nodes
  constexpr size_t kWordBits = 8 * sizeof(unsigned long);
  if (none()) return;
  unsigned long mask[kNumbers / kWordBits] = {};
  for (const int32_t number : numbers_) {
    const auto bit = static_cast<size_t>(number);
    if (bit < kNumbers) mask[bit / kWordBits] |= 1UL << bit % kWordBits;
  }
  // The kernel reads one bit less than the number that it is given.
  syscall(SYS_mbind, memory, static_cast<size_t>(num_bytes), kInterleave, mask, kNumbers + 1, 0);
}

Stay::Stay(const Nodes& nodes, int thread) {
  if (nodes.none() || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
  CoreSet cores;
  CPU_AND(&cores, &before_, &nodes.cores_of(thread));
  if (CPU_COUNT(&cores) == 0) return;
  is_bound_ = sched_setaffinity(0, sizeof cores, &cores) == 0;
}

Stay::~Stay() {
  if (is_bound_) sched_setaffinity(0, sizeof before_, &before_);
}

#else

void Nodes::interleave(void*, int64_t) const {}

Stay::Stay(const Nodes&, int) {}

Stay::~Stay() = default;

#endif

}  // namespace ts
