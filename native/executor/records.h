// What crosses the C interface: the lowered Program, and one step's work. Plain data only;
// src/twostroke/backends/cpu/records.py mirrors each layout.
#pragma once

#include <cstdint>

#include "executor/link.h"
#include "kernels/attention.h"
#include "kernels/rope.h"
#include "kernels/rows.h"
#include "linear/linear.h"
#include "sample/sample.h"

namespace ts {

constexpr int32_t kNone = -1;
constexpr int kMaxOutputs = 4;

enum class OpKind : int32_t {
  Embed = 0,           // outputs[0] = rows of its weight times `factor`
  Norm = 1,            // outputs[0] = norm of x, in `num_groups` pieces; added to y if there is one
  Linear = 2,          // outputs = products with x (normed first if `norm`), and what follows them
  Gated = 3,           // outputs[0] = gated products 0 and 1 of x (normed first if `norm`)
  Rope = 4,            // outputs[0] = rotated x
  Attention = 5,       // outputs[0] = attention of x over the pages of `layer`
  Activation = 6,      // outputs[0] = activation(x) * y
  Add = 7,             // outputs[0] = x + y
  Logits = 8,          // logits of the sampled rows of x (normed first if `norm`)
  Scale = 9,           // outputs[0] = x * `factor`
  Tap = 10,            // rows of x leave the step as its value `tap`
  Experts = 11,        // outputs[0] = mixture of experts of x, the scores being y
  ExternalInput = 12,  // outputs[0] = rows from outside of the step
  Gather = 13,         // outputs[0] = the whole of x, or of what lies there, on all of the team
  Send = 14,           // rows of x go to another rank
  Receive = 15,        // outputs[0] = rows from another rank
  Terms = 16,          // outputs[0] = terms of this rank's experts of x, the scores being y
  SumTerms = 17,       // outputs[0] = sum of the terms x times their shares, the scores being y
  Copy = 18,           // outputs[0] = x
  Pieces = 19,         // outputs[0] = this rank's part of attention of x over the pages of `layer`,
                       // of which each of a team stores some pieces; y and z are stored first
  HeadProducts = 20,   // outputs[0] = products of each head of x with its own weight
  Join = 21,           // outputs[0] = some of each head of x, then the head of y
  Route = 22,          // outputs[0] = shares of experts that a row of scores x chooses, else -1
  GateRows = 23,       // outputs[0] = x * sigmoid(y), y being one value wide
  Convolution = 24,    // outputs[0] = activation(causal convolution of x), with the state `layer`
  DeltaRule = 25,  // outputs[0] = gated delta rule of x, the decays being y and the strengths z,
                   // with the state `layer`
  Mamba2 = 26,     // outputs[0] = Mamba-2 of x, the time steps being y, with the state `layer`
};

/// Which part of a gathered value each member of a team has: columns from cut to cut; of n rows
/// those from n * i / size on; rows whose token lies from cut to cut; terms of the experts whose
/// number does.
enum class Parts : int32_t { Columns = 0, Rows = 1, Tokens = 2, Terms = 3 };

/// How an operation's products are computed. Plain: 15 bits of an activation, on AMX bfloat16 tiles
/// for prompt rows. Precise: tiles split in two, and no tiles for attention. Coarse: 8 bits of an
/// activation in place of 15. Mixed: 15 where a row's numbers are large.
enum class Precision : int32_t { Plain = 0, Precise = 1, Coarse = 2, Mixed = 3 };

/// What becomes of a product once it is computed.
enum class Store : int32_t { Nothing = 0, Keys = 1, Values = 2 };

/// One matrix product of an operation, or its only output. What follows a product, in this order:
/// the bias, the norm of each head, the rotation, the store.
struct OutputRecord {
  int32_t weight;  // index into weights, or kNone
  int32_t bias;    // index into vectors, or kNone; Route: factors of the shares;
                   // DeltaRule: biases of the decays; Mamba2: of the time steps
  int32_t buffer;  // where it goes
  int32_t width;
  int32_t norm;      // of heads: index into vectors, or kNone; Mamba2: factors of the skip
  int32_t head_dim;  // of the norm; DeltaRule, Mamba2: of a value head
  float epsilon;     // of the norm
  int32_t rope;      // index into ropes, or kNone
  Store store;
};

/// One fused operation. `x`, `y` and `z` are buffers. A field that a kind does not name is ignored.
struct OpRecord {
  OpKind kind;
  int32_t x;
  int32_t y;
  int32_t z;
  int32_t width;  // of x
  int32_t norm;   // index into vectors, or kNone; Route: bias of the choice; Scale: a factor;
                  // Convolution: its taps (kernel, width); DeltaRule, Mamba2: rates of the decays;
                  // Attention, Pieces: sinks, of this rank's query heads or of the whole
  float epsilon;
  int32_t num_groups;  // of a norm; DeltaRule: key heads
  int32_t accumulate;  // Linear, Experts: results are added to what the buffers hold
  int32_t layer;  // for Attention, Pieces and for products that are stored; of recurrent operations
                  // the index into state_layers
  int32_t num_heads;  // Pieces: of the whole; HeadProducts, Join; DeltaRule, Mamba2: of values, on
                      // a rank
  int32_t group;  // Attention, Pieces: query heads of a whole key-value head; DeltaRule, Mamba2:
                  // value heads of a key head
  int32_t first_head;  // Attention: place of the first query head in its key-value head's group;
                       // DeltaRule, Mamba2: the first value head of the rank
  float scale;         // Attention, Pieces: of the scores; Mamba2: the smallest time step
  float factor;        // Embed, Scale, Route: of the shares; Mamba2: the largest time step
  float
      soft_cap;  // Attention, Pieces, Logits: x becomes soft_cap * tanh(x / soft_cap), 0: it stays
  Activation activation;
  int32_t is_stored;     // Attention, Pieces: keys and values are in pages already, else in y and z
  int32_t tap;           // index into the step's taps
  int32_t window;        // Attention, Pieces: each row sees this many keys up to its own, 0: all
  int32_t is_chunked;    // Attention, Pieces: or the keys of its own chunk of so many positions
  int32_t first_expert;  // index into experts
  int32_t num_experts;
  int32_t own_expert;   // Terms: number of the first expert that this rank has
  int32_t num_own;      // Terms: how many it has
  int32_t num_used;     // experts of a row
  Shares shares;        // Experts, SumTerms: of a row's experts; Terms: OfInputs, or any other;
                        // Route: All or Chosen
  Precision precision;  // Linear, Gated, Logits, Experts, Terms, Attention, Pieces
  int32_t team;  // Gather, Logits, Pieces; Linear and Gated, if ranks prepare their rows together:
                 // index into teams, or kNone
  Parts parts;   // Gather
  int32_t first_cut;   // Gather, Logits, Embed of some tokens: index into cuts, or kNone;
                       // Pieces: where query heads are cut
  int32_t num_parts;   // Pieces: of query heads; member i has part i % num_parts, and of the rows
                       // part i / num_parts
  int32_t channel;     // Send, Receive: index into channels
  int32_t x_head;      // HeadProducts, Join: values of a head of x, of which an operation takes
                       // (DeltaRule, Mamba2: of a head of queries or keys)
  int32_t x_first;     // those from here on:
  int32_t x_width;     // so many
  int32_t is_sigmoid;  // Route: of scores, else their softmax
  int32_t num_used_groups;  // Route: of the `num_groups` in which experts are chosen
  int32_t group_best;       // Route: by the sum of so many of a group's largest scores
  int32_t kernel;           // Convolution: of so many rows, up to each row itself
  int32_t is_tiled;        // DeltaRule: head h of values has key head h % key heads, else h / group
  int32_t gates_channels;  // DeltaRule: decays, and their biases, are of each channel of the keys
  int32_t is_wide;         // Norm: each group has its own part of the weight
  int32_t num_outputs;     // 0: Logits of which this rank has none, but gathers those of others
  OutputRecord outputs[kMaxOutputs];
};

inline Window window_of(const OpRecord& attention) {
  return {attention.window == 0 ? kNoWindow : attention.window, attention.is_chunked != 0};
}

/// One expert's matrices: indices into weights; and their biases: indices into vectors, or kNone.
struct ExpertRecord {
  int32_t gate;
  int32_t up;
  int32_t down;
  int32_t gate_bias;
  int32_t up_bias;
  int32_t down_bias;
};

/// A rotation, and the temperature by which queries are multiplied.
struct RopeRecord {
  const double* inverse_frequencies;
  double magnitude;
  Temperature temperature;
  int32_t num_pairs;
  int32_t is_interleaved;
  int32_t head_dim;
  int32_t reserved;
};

/// What one attention layer stores. Layers of a group share pages: a page holds tokens of
/// all layers of one group.
struct LayerRecord {
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t group;
  int32_t num_places;  // of so many pieces this rank stores one: that at `place`
  int32_t place;
  const float* balance;  // (3, num_kv_heads * head_dim), as in LayerPages; null: none
  int32_t values_are_keys;
};

/// Rows that ranks may share: `width` values each, as many as the step has, or `num_rows`.
struct MemoryRecord {
  int64_t offset;  // within the link's shared memory, or -1: this rank's own
  int32_t width;
  int32_t num_rows;  // 0: those of the step
};

/// Columns of a memory, from `first_column` on: where a value lies.
struct BufferRecord {
  int32_t memory;
  int32_t first_column;
};

/// Ranks that gather values. This one is member `place`; all know its barrier by one number.
struct TeamRecord {
  int32_t first_rank;  // index into team_ranks
  int32_t size;
  int32_t place;
  int32_t barrier;
  int64_t prepared_offset;  // in the link's shared memory: two places for prepared rows
  int64_t prepared_bytes;   // of each
  int64_t tiles_offset;     // in the link's shared memory: two places for tiles of attention
  int64_t tile_bytes;       // of each
};

/// The way from one rank to another, through `kChannelSlots` places in shared memory.
struct ChannelRecord {
  int64_t offset;  // within the link's shared memory
  int32_t peer;    // the other rank
  int32_t number;  // by which both know it
};

/// The Program, lowered. Arrays are copied, except what weights and vectors point to.
struct PlanRecord {
  const OpRecord* ops;
  const PackedWeight* weights;
  const float* const* vectors;
  const RopeRecord* ropes;
  const LayerRecord* layers;
  const ExpertRecord* experts;
  const MemoryRecord* memories;
  const BufferRecord* buffers;
  const TeamRecord* teams;
  const int32_t* team_ranks;
  const int32_t* cuts;
  const ChannelRecord* channels;
  const int64_t* state_layers;  // float32 numbers of each recurrent state of a request
  const LinkRecord* link;       // copied; null: one process
  int32_t num_ops;
  int32_t num_weights;
  int32_t num_vectors;
  int32_t num_ropes;
  int32_t num_layers;
  int32_t num_groups;  // of layers
  int32_t num_experts;
  int32_t num_memories;
  int32_t num_buffers;
  int32_t num_teams;
  int32_t num_team_ranks;
  int32_t num_cuts;
  int32_t num_channels;
  int32_t num_state_layers;
  CacheFormat cache_format;
  int64_t num_pages;
  int64_t num_states;  // slots for the recurrent states of requests
  int64_t page_size;   // tokens, of all places
  int64_t max_rows;    // of a step, for which shared memory has room
  int32_t row_part;    // this rank computes rows n * row_part / num_row_parts on
  int32_t num_row_parts;
};

/// Consecutive rows of one request, all prompt or all generated.
struct SliceRecord {
  int32_t row;  // its first row in the step
  int32_t num_rows;
  int32_t position;
  int32_t table;  // which page tables, one for each group of layers
};

/// The slots of a slice's recurrent states: before its first row, or kNone for zeros, and after its
/// last, unless `row_states` of the step names other slots. Both are the same if it continues
/// another slice with this slot.
struct StateRecord {
  int32_t read;
  int32_t write;
};

/// A row whose keys and values are stored in other pages, too: those of a branch of drafts that it
/// is an ancestor of.
struct StoreRecord {
  int32_t row;
  int32_t table;
};

/// Before the step's rows are stored, page `to` is made to hold what page `from` does.
struct CopyRecord {
  int32_t from;
  int32_t to;
};

/// One step. Rows [0, num_generated) are generated, the others prompt.
struct StepRecord {
  const int32_t* tokens;  // (num_rows)
  const SliceRecord* slices;
  const int32_t* page_tables;   // (tables, groups of layers, table_stride)
  const int32_t* sampled_rows;  // ascending
  /// For each sampled row whether it draws the token of its largest logit and asks for nothing
  /// else, so that ranks need not send all logits to rank 0. Null: none does.
  const int32_t* only_best;
  const SampleRow* samples;  // one for each sampled row, or null: nothing is drawn
  SampleResult* results;
  float* logits;              // (num_sampled, vocab_size), or null
  float* const* taps;         // (num_rows, width of the value) each; null if none is wanted
  const float* external;      // (num_rows, width of the value), or null if the plan has none
  const StoreRecord* stores;  // by row, ascending
  const CopyRecord* copies;   // no page is in two of them as `to`, or as both
  const StateRecord* states;  // of each slice; null if the plan has no recurrent states
  /// (num_rows) the slot for the recurrent state after each row, or kNone, which the last row of a
  /// slice never has. Null: only the last row of each slice stores its state.
  const int32_t* row_states;
  int64_t table_stride;
  int32_t num_rows;
  int32_t num_generated;
  int32_t num_slices;
  int32_t num_sampled;
  int32_t num_stores;
  int32_t num_copies;
  double elapsed_s;     // out: the whole step
  double kernel_s;      // out: of it, not spent waiting for each other (mean of the threads)
  double collective_s;  // out: of it, exchanging values with other ranks, and waiting for them
};

}  // namespace ts
