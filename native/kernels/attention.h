// Causal attention of some rows of one request, for one key-value head, over its pages.
//
// The context is cut at absolute positions into pieces of 64 keys. A piece's share of a row is
// computed from that row and the piece alone (its own maximum, sum and weighted values), and
// shares are merged in the order of the pieces. So neither the rows computed beside it, nor who
// computes which piece, nor where the pages lie, can change a bit of a row's result.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kv.h"

namespace ts {

constexpr int64_t kPieceTokens = 64;

constexpr int64_t num_pieces(int64_t context) {
  return (context + kPieceTokens - 1) / kPieceTokens;
}

/// Rows at `position`, `position + 1`, ... of one request, and the pieces that one task covers.
struct AttentionRows {
  const float* q;  // first row, first query head of the key-value head
  int64_t q_stride;
  float* out;  // likewise
  int64_t out_stride;
  int64_t num_rows;
  int64_t position;
  const int32_t* page_table;
  int64_t group;  // query heads a key-value head
  int64_t head;   // key-value head
  float scale;

  int64_t num_queries() const { return num_rows * group; }
};

/// One thread's working memory.
struct AttentionScratch {
  void fit(int64_t num_queries, int64_t head_dim);

  std::vector<float> q;       // (queries, head_dim), scaled
  std::vector<float> out;     // (queries, head_dim), not yet divided by the sums
  std::vector<float> peak;    // (queries)
  std::vector<float> sum;     // (queries)
  std::vector<float> keys;    // a piece in float32
  std::vector<float> values;  // likewise
};

/// Where the shares of pieces wait to be merged when several tasks cover a context.
struct PieceShares {
  static int64_t num_floats(int64_t num_queries, int64_t head_dim) {
    return num_queries * (head_dim + 2);
  }
  float* data;  // for each piece: out (queries, head_dim), peak (queries), sum (queries)
};

/// The whole context: writes the rows of `out`.
void attend(const AttentionRows& rows, const LayerPages& pages, AttentionScratch& scratch);

/// Pieces [begin, end): writes their shares.
void attend_pieces(const AttentionRows& rows, const LayerPages& pages, int64_t begin, int64_t end,
                   AttentionScratch& scratch, const PieceShares& shares);

/// Merges the shares of all pieces and writes the rows of `out`.
void merge_pieces(const AttentionRows& rows, int64_t head_dim, AttentionScratch& scratch,
                  const PieceShares& shares);

}  // namespace ts
