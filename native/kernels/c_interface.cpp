// The C face of single kernels, for their tests; its names start with ts_kernel_.
#include <algorithm>
#include <vector>

#include "kernels/attention.h"
#include "kernels/kv.h"
#include "kernels/lane_math.h"
#include "kernels/recurrent.h"
#include "kernels/rope.h"
#include "kernels/rows.h"
#include "kernels/spread.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

TS_EXPORT void ts_kernel_exp2(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i + ts::kLanes <= count; i += ts::kLanes) {
    ts::store_lanes(out + i, ts::exp2(ts::load_lanes(x + i)));
  }
}

TS_EXPORT void ts_kernel_tanh(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i + ts::kLanes <= count; i += ts::kLanes) {
    ts::store_lanes(out + i, ts::tanh(ts::load_lanes(x + i)));
  }
}

/// There and back: float32 to float16 (saturated, as in the pages) to float32; 16 at a time.
TS_EXPORT void ts_kernel_halves(const float* x, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i + ts::kLanes <= count; i += ts::kLanes) {
    ts::store_halves(out + i, ts::load_lanes(x + i));
  }
}

TS_EXPORT void ts_kernel_rms_norm(const float* x, const float* weight, int64_t width, float epsilon,
                                  float* out) {
  ts::rms_norm(x, weight, width, epsilon, out);
}

TS_EXPORT void ts_kernel_gate(int32_t activation, const float* gate, const float* up, int64_t width,
                              float* out) {
  ts::gate_activation(static_cast<ts::Activation>(activation), gate, up, width, out);
}

TS_EXPORT void ts_kernel_gate_row(const float* x, const float* gate, int64_t width, float* out) {
  ts::gate_row(x, gate, width, out);
}

/// A convolution of dense rows, without an activation.
TS_EXPORT void ts_kernel_convolve(const float* x, const float* taps, const float* bias,
                                  int64_t num_rows, int64_t width, int64_t kernel,
                                  const float* read, float* write, float* out) {
  const ts::Convolution op{width, kernel, taps, bias, ts::Activation::None};
  ts::convolve(op, {x, width, out, width, num_rows, read, write}, 0, width);
}

/// A head of the delta rule: a row of `x` has a query, a key and a value; `gates` has a decay for
/// each bias, and a strength for each row. There are `num_biases` biases: 1 or `key_dim`.
TS_EXPORT void ts_kernel_delta_rule(const float* x, const float* gates, int64_t num_rows,
                                    int64_t key_dim, int64_t value_dim, float decay_rate,
                                    const float* decay_biases, int64_t num_biases,
                                    const float* read, float* write, float* out) {
  const float* channel_biases = num_biases == 1 ? nullptr : decay_biases;
  const ts::StateHead head{key_dim,        value_dim, 1e-6F, decay_rate, decay_biases[0],
                           channel_biases, 0,         0,     0};
  const int64_t stride = 2 * key_dim + value_dim;
  const int64_t gates_stride = num_biases + 1;
  const ts::StateHeadRows rows{x,     x + key_dim,  x + 2 * key_dim,    stride,
                               gates, gates_stride, gates + num_biases, gates_stride,
                               out,   value_dim,    num_rows,           read,
                               write};
  std::vector<float> scratch(static_cast<size_t>(ts::state_scratch_floats(key_dim)));
  ts::delta_rule(head, rows, 0, value_dim, scratch.data());
}

/// A head of Mamba-2: a row of `x` has values, a key and a query; `steps` has its time step.
/// `constants`: rate of the decay, bias of the step, factor of the skip, limits of the step.
TS_EXPORT void ts_kernel_mamba2(const float* x, const float* steps, int64_t num_rows,
                                int64_t key_dim, int64_t value_dim, const float* constants,
                                const float* read, float* write, float* out) {
  const ts::StateHead head{key_dim,      value_dim,    0,
                           constants[0], constants[1], nullptr,
                           constants[2], constants[3], constants[4]};
  const int64_t stride = 2 * key_dim + value_dim;
  const ts::StateHeadRows rows{x + value_dim + key_dim,
                               x + value_dim,
                               x,
                               stride,
                               steps,
                               1,
                               nullptr,
                               0,
                               out,
                               value_dim,
                               num_rows,
                               read,
                               write};
  std::vector<float> scratch(static_cast<size_t>(ts::state_scratch_floats(key_dim)));
  ts::mamba2(head, rows, 0, value_dim, scratch.data());
}

TS_EXPORT void ts_kernel_choose_experts(const float* scores, int64_t num_experts, int64_t num_used,
                                        int32_t kind, int32_t* chosen, float* shares) {
  ts::choose_experts(scores, num_experts, num_used, static_cast<ts::Shares>(kind), chosen, shares);
}

TS_EXPORT void ts_kernel_weighted_sum(const float* x, int64_t stride, const int32_t* rows,
                                      const float* factors, int64_t count, int64_t width,
                                      int32_t accumulate, float* out) {
  ts::weighted_sum(x, stride, rows, factors, count, width, accumulate != 0, out);
}

TS_EXPORT void ts_kernel_soft_cap(float* x, float cap, int64_t width) {
  ts::soft_cap_row(x, cap, width);
}

TS_EXPORT void ts_kernel_rope(const double* inverse_frequencies, int32_t num_pairs,
                              int32_t is_interleaved, double magnitude,
                              const ts::Temperature* temperature, int32_t head_dim,
                              int64_t position, float* row, int64_t width) {
  ts::RopeTable table(inverse_frequencies, num_pairs, is_interleaved != 0, magnitude, *temperature,
                      head_dim);
  table.cover(position + 1);
  table.rotate(position, row, 0, width);
}

TS_EXPORT void ts_kernel_spread(float* head, int64_t head_dim) { ts::spread(head, head_dim); }

/// Attention of `num_rows` rows at `position` and on, one key-value head after the other, over
/// `pages` that ts_kernel_store has filled. With `split` pieces above 0, tasks of that many pieces
/// are computed apart and merged.
struct TsAttention {
  uint8_t* pages;
  const int32_t* page_table;
  int64_t page_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t group;
  int64_t position;
  int64_t num_rows;
  int64_t split;
  int64_t window;  // 0: none
  int64_t format;  // ts::CacheFormat
  float scale;
  float soft_cap;  // 0: none
  const float* balance;
  int64_t is_prompt;
  const float* sinks;  // (kv_heads * group), or null
  int64_t is_chunked;  // the window
};

namespace {

ts::LayerPages layer_pages(const TsAttention& a) {
  const auto format = static_cast<ts::CacheFormat>(a.format);
  ts::LayerPages pages{a.pages, 0, a.page_size, a.num_kv_heads, a.head_dim, format};
  pages.page_stride = pages.page_bytes();
  pages.balance = a.balance;
  return pages;
}

}  // namespace

/// Stores rows of keys and of values (num_rows, kv_heads * head_dim).
TS_EXPORT void ts_kernel_store(const TsAttention* a, const float* keys, const float* values) {
  const int64_t width = a->num_kv_heads * a->head_dim;
  for (int64_t row = 0; row < a->num_rows; ++row) {
    const int64_t position = a->position + row;
    ts::store_keys(layer_pages(*a), a->page_table, position, keys + row * width, 0, width);
    ts::store_values(layer_pages(*a), a->page_table, position, values + row * width, 0, width);
  }
}

TS_EXPORT void ts_kernel_attention(const TsAttention* a, const float* q, float* out) {
  const ts::LayerPages pages = layer_pages(*a);
  const int64_t stride = a->num_kv_heads * a->group * a->head_dim;
  const ts::Window window{a->window == 0 ? ts::kNoWindow : a->window, a->is_chunked != 0};
  ts::AttentionScratch scratch;
  std::vector<float> memory;
  for (int64_t head = 0; head < a->num_kv_heads; ++head) {
    const int64_t first = head * a->group * a->head_dim;
    const ts::AttentionRows rows{q + first,
                                 stride,
                                 out + first,
                                 stride,
                                 a->num_rows,
                                 a->position,
                                 a->page_table,
                                 a->group,
                                 head,
                                 window,
                                 a->scale,
                                 a->soft_cap,
                                 a->is_prompt != 0,
                                 a->sinks == nullptr ? nullptr : a->sinks + head * a->group};
    if (a->split == 0) {
      ts::attend(rows, pages, scratch);
      continue;
    }
    const ts::Pieces pieces = rows.pieces();
    memory.resize(
        static_cast<size_t>((pieces.end - pieces.begin) *
                            ts::PieceShares::num_floats(rows.num_queries(), a->head_dim)));
    const ts::PieceShares shares{memory.data(), pieces.begin, a->num_rows, a->group, 0, 0};
    for (int64_t piece = pieces.begin; piece < pieces.end; piece += a->split) {
      const ts::Pieces part{piece, std::min(piece + a->split, pieces.end)};
      ts::attend_pieces(rows, pages, part, scratch, shares);
    }
    ts::merge_pieces(rows, a->head_dim, pieces, scratch, shares, {});
  }
}
