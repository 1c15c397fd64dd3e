// Attention where each rank of a team stores some pieces of the keys and values.
#pragma once

#include <cstddef>

namespace ts {

struct Plan;
struct Worker;

/// A member stores its pieces of the step's keys and values. Then members exchange, a tile after
/// the other, the shares of their pieces, or the keys and values themselves; each merges its heads
/// of its rows, in the order of pieces.
void run_pieces(Worker& worker, size_t index);

/// Makes room for tiles where ranks share no memory; throws std::bad_alloc.
void make_room_for_pieces(Plan& plan);

}  // namespace ts
