// Causal attention of some rows of one request, for one key-value head, over its pages.
//
// A row sees the keys up to its own position: all of them, the last of a window, or those of its
// own chunk. A page that no row sees is not read, so that it need not be there any more.
//
// The context is cut at absolute positions into pieces of 64 keys. A piece's share of a row is
// computed from that row and the piece alone (its own maximum, sum and weighted values), and
// shares are merged in the order of the pieces. So neither the rows computed beside it, nor the
// thread that computes a piece, nor the place of the pages, can change a bit of a row's result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kv.h"
#include "linear/layout.h"
#include "linear/scratch.h"

namespace ts {

constexpr int64_t num_pieces(int64_t context) {
  return (context + kPieceTokens - 1) / kPieceTokens;
}

constexpr int64_t kNoWindow = INT64_MAX / 2;

/// What a row sees: the last `size` keys up to its own; or, of a context that is cut into chunks of
/// `size` positions, those of its own chunk.
struct Window {
  int64_t size = kNoWindow;
  bool is_chunked = false;

  bool operator==(const Window& other) const {
    return size == other.size && is_chunked == other.is_chunked;
  }

  /// The first position that does not see a key any more.
  int64_t end_of(int64_t key) const { return is_chunked ? (key / size + 1) * size : key + size; }
};

/// The first position that a row sees.
constexpr int64_t first_seen(int64_t position, const Window& window) {
  if (window.is_chunked) return position / window.size * window.size;
  return position < window.size ? 0 : position - window.size + 1;
}

/// The piece in which it lies.
constexpr int64_t first_piece(int64_t position, const Window& window) {
  return first_seen(position, window) / kPieceTokens;
}

/// Pieces [begin, end) of a context.
struct Pieces {
  int64_t begin;
  int64_t end;
};

/// Rows at `position`, `position + 1`, ... of one request.
struct AttentionRows {
  const float* q;  // first row, first query head of the key-value head
  int64_t q_stride;
  float* out;  // first row, first query head
  int64_t out_stride;
  int64_t num_rows;
  int64_t position;
  const int32_t* page_table;
  int64_t group;  // query heads a key-value head
  int64_t head;   // key-value head
  Window window;
  float scale;
  float soft_cap;      // scores s become soft_cap * tanh(s / soft_cap); 0: they stay
  bool is_prompt;      // int16 keys and values then meet them in bfloat16, on AMX
  const float* sinks;  // of the query heads: a score whose value is zero; null: none

  int64_t num_queries() const { return num_rows * group; }
  int64_t piece_begin() const { return first_piece(position, window); }
  int64_t piece_end() const { return num_pieces(position + num_rows); }
  Pieces pieces() const { return {piece_begin(), piece_end()}; }

  /// Rows [row_begin, row_end) see keys of a piece.
  int64_t row_begin(int64_t piece) const {
    return piece * kPieceTokens < position ? 0 : piece * kPieceTokens - position;
  }
  int64_t row_end(int64_t piece) const {
    const int64_t last = piece * kPieceTokens + kPieceTokens - 1;  // position of its last key
    return std::min(window.end_of(last) - position, num_rows);
  }
};

/// Floats on lines of the cache: a vector's would lie across them, and each load read two.
class Floats {
 public:
  void fit(int64_t count) { memory_.reserve(count * static_cast<int64_t>(sizeof(float))); }
  float* data() const { return reinterpret_cast<float*>(memory_.data()); }

 private:
  Scratch memory_;
};

/// One thread's working memory.
struct AttentionScratch {
  void fit(int64_t num_queries, int64_t head_dim);

  int16_t* codes() const { return reinterpret_cast<int16_t*>(half_floats.data()); }

  Floats q;            // (queries, head_dim), scaled
  Floats half_floats;  // the same as whole numbers or bfloat16
  Floats scales;       // (queries), of whole numbers
  Floats out;          // (queries, head_dim), not yet divided by the sums
  Floats peak;         // (queries)
  Floats sum;          // (queries)
  Floats keys;         // a piece in float32 or bfloat16
  Floats values;       // the same piece
};

/// Where the shares of pieces wait to be merged when several tasks or ranks cover a context.
struct PieceShares {
  float* data;  // for each piece from the first on, for each row and head: out (head_dim) of all,
                // then all peaks, then all sums
  int64_t first_piece;
  int64_t num_rows;
  int64_t num_heads;   // of each row
  int64_t first_row;   // the place among them of the first row of AttentionRows
  int64_t first_head;  // the same of the first query head

  /// Of one piece; a multiple of 16.
  static int64_t num_floats(int64_t num_queries, int64_t head_dim) {
    return round_up(num_queries * (head_dim + 2), kBlockTokens);
  }
  int64_t num_queries() const { return num_rows * num_heads; }
  float* of_piece(int64_t piece, int64_t head_dim) const {
    return data + (piece - first_piece) * num_floats(num_queries(), head_dim);
  }
};

/// Where peaks and sums stay when the pieces of rows are merged in several calls; what is merged of
/// the values stays in the rows' `out`.
struct Merged {
  float* peak;  // first row, first query head; null: all pieces are merged in one call
  float* sum;
  int64_t stride;
};

/// The whole context: writes the rows of `out`.
void attend(const AttentionRows& rows, const LayerPages& pages, AttentionScratch& scratch);

/// The same in several calls, one for each part of the context, in order.
void attend(const AttentionRows& rows, const LayerPages& pages, const Pieces& pieces,
            AttentionScratch& scratch, const Merged& merged);

/// Writes the shares of those pieces that are stored here.
void attend_pieces(const AttentionRows& rows, const LayerPages& pages, const Pieces& pieces,
                   AttentionScratch& scratch, const PieceShares& shares);

/// Merges the shares of pieces with those of the pieces before them, and writes the rows of `out`.
void merge_pieces(const AttentionRows& rows, int64_t head_dim, const Pieces& pieces,
                  AttentionScratch& scratch, const PieceShares& shares, const Merged& merged);

}  // namespace ts
