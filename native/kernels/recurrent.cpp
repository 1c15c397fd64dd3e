// Short convolutions, the gated delta rule and Mamba-2, row by row.
#include "kernels/recurrent.h"

#include <algorithm>
#include <cmath>

#include "kernels/activation.h"

namespace ts {

namespace {

Lanes load_some(const float* p, int count) {
  return count == kLanes ? load_lanes(p) : load_first(p, count);
}

void store_some(float* p, Lanes a, int count) {
  count == kLanes ? store_lanes(p, a) : store_first(p, a, count);
}

}  // namespace

void convolve(const Convolution& op, const ConvolutionRows& rows, int64_t begin, int64_t end) {
  const int64_t num_before = op.kernel - 1;
  // The rows of the state, then those of x; null: zeros.
  const auto row_at = [&](int64_t i) -> const float* {
    if (i >= num_before) return rows.x + (i - num_before) * rows.x_stride;
    return rows.read == nullptr ? nullptr : rows.read + i * op.width;
  };
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    float* out = rows.out + row * rows.out_stride;
    for (int64_t column = begin; column < end; column += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(end - column, kLanes));
      Lanes sum = zero_lanes();
      for (int64_t tap = 0; tap < op.kernel; ++tap) {
        const float* x = row_at(row + tap);
        if (x == nullptr) continue;
        const Lanes factor = load_some(op.taps + tap * op.width + column, count);
        sum = multiply_add(load_some(x + column, count), factor, sum);
      }
      if (op.bias != nullptr) sum = add(sum, load_some(op.bias + column, count));
      store_some(out + column, activate(op.activation, sum), count);
    }
  }
  // The last row first: a state after a row may take the place of the state that was read.
  for (int64_t row = rows.num_rows - 1; row >= 0; --row) {
    float* state = rows.target.after(row, rows.num_rows);
    if (state == nullptr) continue;
    for (int64_t i = 0; i < num_before; ++i) {
      const float* x = row_at(row + 1 + i);
      float* kept = state + i * op.width;
      if (x == nullptr) {
        std::fill(kept + begin, kept + end, 0.0F);
      } else if (x != kept) {
        std::copy(x + begin, x + end, kept + begin);
      }
    }
  }
}

namespace {

constexpr int64_t kRowsTogether = 8;  // whose queries, keys and gates are prepared at once

/// ln(1 + e^x) to a few units in the last place, however small.
Lanes softplus(Lanes x) {
  const Lanes magnitude = larger(subtract(zero_lanes(), x), x);
  const Lanes power = exp2(multiply(magnitude, broadcast(-kLog2E)));
  // ln(1 + p) = 2 artanh(s) with s = p / (2 + p), at most 1 / 3.
  const Lanes s = divide(power, add(power, broadcast(2.0F)));
  const Lanes z = multiply(s, s);
  Lanes series = broadcast(2.0F / 15);
  for (const float divisor : {13.0F, 11.0F, 9.0F, 7.0F, 5.0F, 3.0F, 1.0F}) {
    series = multiply_add(series, z, broadcast(2.0F / divisor));
  }
  return multiply_add(s, series, larger(zero_lanes(), x));
}

/// Whether stores may leave the caches aside. A state is read again in the next step only, and by
/// then weights have taken its place; without reading lines that are overwritten, a head takes
/// three quarters of the time.
#if TS_LEVEL >= 2 && !defined(TS_EMULATE_AVX512)
constexpr bool kCanStream = true;
void stream_lanes(float* p, Lanes a) { _mm512_stream_ps(p, a.v); }
void end_streams() { _mm_sfence(); }
#elif TS_LEVEL == 1
constexpr bool kCanStream = true;
void stream_lanes(float* p, Lanes a) {
  _mm256_stream_ps(p, a.v[0]);
  _mm256_stream_ps(p + kLanes / 2, a.v[1]);
}
void end_streams() { _mm_sfence(); }
#else
constexpr bool kCanStream = false;
void stream_lanes(float* p, Lanes a) { store_lanes(p, a); }
void end_streams() {}
#endif

/// Where the state after a row goes.
enum class Target { Cache, Memory };

/// How the state of a head changes. Delta: what the state predicts for the key is subtracted from
/// the value. Channels: the same, and each channel of the keys has a decay of its own. Mamba2: the
/// value is added as it is, and `skip` times the value to the output.
enum class Rule { Delta, Channels, Mamba2 };

/// What rows need besides their values and the state.
struct Prepared {
  float decays[kLanes];     // not of Channels
  float strengths[kLanes];  // Mamba2: time steps
  float* queries;           // (kRowsTogether, key_dim); not of Mamba2: scaled
  float* keys;              // the same
  float* channel_decays;    // the same, of Channels
  float* decayed_keys;      // keys times decays, of Channels
};

void scale_unit(const float* x, int64_t width, float epsilon, float factor, float* out) {
  scale_row(x, factor / std::sqrt(sum_of_squares(x, width) + epsilon), width, out);
}

/// e^(rate * softplus(x + bias))
Lanes decay_of(Lanes x, Lanes bias, float rate) {
  const Lanes exponent = multiply(softplus(add(x, bias)), broadcast(rate));
  return exp2(multiply(exponent, broadcast(kLog2E)));
}

/// The decays of a row's channels, and its key times them.
void decay_channels(const StateHead& head, const float* x, const float* key, float* decays,
                    float* decayed_key) {
  for (int64_t i = 0; i < head.key_dim; i += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(head.key_dim - i, kLanes));
    const Lanes bias = load_some(head.channel_biases + i, count);
    const Lanes decay = decay_of(load_some(x + i, count), bias, head.decay_rate);
    store_some(decays + i, decay, count);
    store_some(decayed_key + i, multiply(load_some(key + i, count), decay), count);
  }
}

template <Rule R>
void prepare_delta(const StateHead& head, const StateHeadRows& rows, int64_t first, int64_t count,
                   Prepared& prepared) {
  const float factor = 1.0F / std::sqrt(static_cast<float>(head.key_dim));
  float decays[kLanes] = {};
  float strengths[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = first + i;
    const int64_t place = i * head.key_dim;
    scale_unit(rows.queries + row * rows.x_stride, head.key_dim, head.epsilon, factor,
               prepared.queries + place);
    scale_unit(rows.keys + row * rows.x_stride, head.key_dim, head.epsilon, 1.0F,
               prepared.keys + place);
    const float* decay = rows.decay + row * rows.decay_stride;
    if constexpr (R == Rule::Channels) {
      decay_channels(head, decay, prepared.keys + place, prepared.channel_decays + place,
                     prepared.decayed_keys + place);
    } else {
      decays[i] = *decay;
    }
    strengths[i] = rows.strength[row * rows.strength_stride];
  }
  if constexpr (R == Rule::Delta) {
    store_lanes(prepared.decays,
                decay_of(load_lanes(decays), broadcast(head.decay_bias), head.decay_rate));
  }
  store_lanes(prepared.strengths, sigmoid(load_lanes(strengths)));
}

void prepare_mamba2(const StateHead& head, const StateHeadRows& rows, int64_t first, int64_t count,
                    Prepared& prepared) {
  float steps[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = first + i;
    std::copy_n(rows.queries + row * rows.x_stride, head.key_dim,
                prepared.queries + i * head.key_dim);
    std::copy_n(rows.keys + row * rows.x_stride, head.key_dim, prepared.keys + i * head.key_dim);
    steps[i] = rows.decay[row * rows.decay_stride];
  }
  const Lanes softened = softplus(add(load_lanes(steps), broadcast(head.decay_bias)));
  // In this order, NaN stays NaN.
  const Lanes step = larger(broadcast(head.min_step), smaller(broadcast(head.max_step), softened));
  store_lanes(prepared.strengths, step);
  const Lanes exponent = multiply(step, broadcast(head.decay_rate));
  store_lanes(prepared.decays, exp2(multiply(exponent, broadcast(kLog2E))));
}

/// Rows of a state; a stride of 0 repeats the first.
struct StateRows {
  const float* data;
  int64_t stride;
};

struct WritableRows {
  float* data;
  int64_t stride;
};

/// Sixteen columns of a state, or if `IsPart` the first `count` of them.
template <bool IsPart>
Lanes load_columns(const float* p, int count) {
  return IsPart ? load_first(p, count) : load_lanes(p);
}

template <bool IsPart>
void store_columns(float* p, Lanes a, int count) {
  IsPart ? store_first(p, a, count) : store_lanes(p, a);
}

/// predicted = key @ state, of N times sixteen columns.
template <int N, bool IsPart>
void predict(const float* key, int64_t key_dim, StateRows state, int count, Lanes* predicted) {
  Lanes sums[N];
  TS_UNROLL
  for (int n = 0; n < N; ++n) sums[n] = zero_lanes();
  for (int64_t i = 0; i < key_dim; ++i) {
    const float* row = state.data + i * state.stride;
    const Lanes factor = broadcast(key[i]);
    TS_UNROLL
    for (int n = 0; n < N; ++n) {
      sums[n] = multiply_add(factor, load_columns<IsPart>(row + n * kLanes, count), sums[n]);
    }
  }
  TS_UNROLL
  for (int n = 0; n < N; ++n) predicted[n] = sums[n];
}

/// One row's part in an update of the state, and the key of the next row, or null.
struct RowFactors {
  const float* query;
  const float* key;
  const float* next_key;
  float decay;
  const float* channel_decays;  // (key_dim), of Channels
};

/// to = decay * from + outer(key, correction); output = query @ to; predicted = next_key @ to.
template <Rule R, int N, bool IsPart, bool HasNext, Target To>
void update(const RowFactors& row, int64_t key_dim, StateRows from, WritableRows to, int count,
            const Lanes* correction, Lanes* output, Lanes* predicted) {
  Lanes corrections[N];
  Lanes outputs[N];
  Lanes sums[N];
  TS_UNROLL
  for (int n = 0; n < N; ++n) {
    corrections[n] = correction[n];
    outputs[n] = sums[n] = zero_lanes();
  }
  const Lanes head_decay = broadcast(row.decay);
  for (int64_t i = 0; i < key_dim; ++i) {
    const float* source = from.data + i * from.stride;
    float* target = to.data + i * to.stride;
    const Lanes decay = R == Rule::Channels ? broadcast(row.channel_decays[i]) : head_decay;
    const Lanes key = broadcast(row.key[i]);
    const Lanes query = broadcast(row.query[i]);
    const Lanes next_key = broadcast(HasNext ? row.next_key[i] : 0.0F);
    TS_UNROLL
    for (int n = 0; n < N; ++n) {
      const Lanes before = load_columns<IsPart>(source + n * kLanes, count);
      const Lanes after = multiply_add(key, corrections[n], multiply(before, decay));
      if constexpr (To == Target::Memory) {
        stream_lanes(target + n * kLanes, after);
      } else {
        store_columns<IsPart>(target + n * kLanes, after, count);
      }
      outputs[n] = multiply_add(query, after, outputs[n]);
      if (HasNext) sums[n] = multiply_add(next_key, after, sums[n]);
    }
  }
  TS_UNROLL
  for (int n = 0; n < N; ++n) {
    output[n] = outputs[n];
    if (HasNext) predicted[n] = sums[n];
  }
}

/// Stores the state of some columns, which lies in `kept`, in the slot of a row before the last.
template <int N, bool IsPart, Target To>
void store_state(WritableRows kept, int64_t key_dim, WritableRows slot, int count) {
  for (int64_t i = 0; i < key_dim; ++i) {
    const float* source = kept.data + i * kept.stride;
    float* target = slot.data + i * slot.stride;
    TS_UNROLL
    for (int n = 0; n < N; ++n) {
      const Lanes state = load_columns<IsPart>(source + n * kLanes, count);
      if constexpr (To == Target::Memory) {
        stream_lanes(target + n * kLanes, state);
      } else {
        store_columns<IsPart>(target + n * kLanes, state, count);
      }
    }
  }
}

/// Rows [first, first + count) of some columns: the state goes from `read` to `write`, and between
/// two rows it lies in `kept`.
template <Rule R, int N, bool IsPart, Target To>
void run_columns(const StateHead& head, const StateHeadRows& rows, int64_t first, int64_t count,
                 const Prepared& prepared, int64_t column, int width, StateRows read,
                 WritableRows kept, WritableRows write) {
  const int64_t key_dim = head.key_dim;
  Lanes predicted[N];
  // What the decayed state predicts: of Channels the keys have the decays, which differ.
  const float* predicting = R == Rule::Channels ? prepared.decayed_keys : prepared.keys;
  if constexpr (R != Rule::Mamba2) predict<N, IsPart>(predicting, key_dim, read, width, predicted);
  for (int64_t i = 0; i < count; ++i) {
    const bool is_last = i + 1 == count;
    const int64_t row = first + i;
    const float* values = rows.values + row * rows.x_stride + column;
    const Lanes decay = broadcast(prepared.decays[i]);
    const Lanes strength = broadcast(prepared.strengths[i]);
    Lanes correction[N];
    TS_UNROLL
    for (int n = 0; n < N; ++n) {
      const Lanes value = load_columns<IsPart>(values + n * kLanes, width);
      if constexpr (R == Rule::Delta) {
        correction[n] = multiply(strength, subtract(value, multiply(predicted[n], decay)));
      } else if constexpr (R == Rule::Channels) {
        correction[n] = multiply(strength, subtract(value, predicted[n]));
      } else {
        correction[n] = multiply(strength, value);
      }
    }
    const RowFactors factors{prepared.queries + i * key_dim, prepared.keys + i * key_dim,
                             predicting + (i + 1) * key_dim, prepared.decays[i],
                             prepared.channel_decays + i * key_dim};
    const StateRows from = i == 0 ? read : StateRows{kept.data, kept.stride};
    Lanes output[N];
    if (is_last) {
      update<R, N, IsPart, false, To>(factors, key_dim, from, write, width, correction, output,
                                      nullptr);
    } else {
      update<R, N, IsPart, R != Rule::Mamba2, Target::Cache>(factors, key_dim, from, kept, width,
                                                             correction, output, predicted);
      if (float* state = rows.target.after(row, rows.num_rows)) {
        const WritableRows slot{state + column, head.value_dim};
        store_state<N, IsPart, To>(kept, key_dim, slot, width);
      }
    }
    if constexpr (R == Rule::Mamba2) {
      const Lanes skip = broadcast(head.skip);
      TS_UNROLL
      for (int n = 0; n < N; ++n) {
        const Lanes value = load_columns<IsPart>(values + n * kLanes, width);
        output[n] = multiply_add(skip, value, output[n]);
      }
    }
    float* out = rows.out + row * rows.out_stride + column;
    TS_UNROLL
    for (int n = 0; n < N; ++n) store_columns<IsPart>(out + n * kLanes, output[n], width);
  }
}

#if TS_LEVEL >= 2
constexpr int kManyLanes = 4;
#else
constexpr int kManyLanes = 2;  // with these, corrections, sums and outputs fit into registers
#endif
static_assert(kStateColumns % (kManyLanes * kLanes) == 0);

int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <Rule R>
void run_rule(const StateHead& head, const StateHeadRows& rows, int64_t begin, int64_t end,
              float* scratch) {
  alignas(64) static const float zeros[2 * kStateColumns] = {};
  const WritableRows kept{scratch, kManyLanes * kLanes};
  Prepared prepared{};
  prepared.queries = scratch + head.key_dim * kept.stride;
  prepared.keys = prepared.queries + padded(kRowsTogether * head.key_dim);
  prepared.channel_decays = prepared.keys + padded(kRowsTogether * head.key_dim);
  prepared.decayed_keys = prepared.channel_decays + padded(kRowsTogether * head.key_dim);
  float* last_state = rows.target.after(rows.num_rows - 1, rows.num_rows);
  const auto address = reinterpret_cast<uintptr_t>(last_state);
  const bool is_aligned = address % 64 == 0 && head.value_dim % kLanes == 0;
  const float* source = rows.read;
  for (int64_t first = 0; first < rows.num_rows; first += kRowsTogether) {
    const int64_t count = std::min(kRowsTogether, rows.num_rows - first);
    if constexpr (R != Rule::Mamba2) {
      prepare_delta<R>(head, rows, first, count, prepared);
    } else {
      prepare_mamba2(head, rows, first, count, prepared);
    }
    float* state = rows.target.after(first + count - 1, rows.num_rows);
    if (state == nullptr) state = last_state;  // its place, until the last rows follow
    const bool streams = kCanStream && is_aligned && first + count == rows.num_rows;
    int64_t step = 0;
    for (int64_t column = begin; column < end; column += step) {
      const StateRows read =
          source == nullptr ? StateRows{zeros, 0} : StateRows{source + column, head.value_dim};
      const WritableRows write{state + column, head.value_dim};
      const auto run = [&](auto kernel, int64_t num_columns) {
        step = num_columns;
        kernel(head, rows, first, count, prepared, column, static_cast<int>(num_columns), read,
               kept, write);
      };
      constexpr int64_t kManyColumns = kManyLanes * kLanes;
      // Of one row, whole rows of the state are read: twice the columns still fit into registers.
      if (streams && rows.num_rows == 1 && end - column >= 2 * kManyColumns) {
        run(run_columns<R, 2 * kManyLanes, false, Target::Memory>, 2 * kManyColumns);
      } else if (streams && end - column >= kManyColumns) {
        run(run_columns<R, kManyLanes, false, Target::Memory>, kManyColumns);
      } else if (end - column >= kManyColumns) {
        run(run_columns<R, kManyLanes, false, Target::Cache>, kManyColumns);
      } else if (end - column >= kLanes) {
        run(run_columns<R, 1, false, Target::Cache>, kLanes);
      } else {
        run(run_columns<R, 1, true, Target::Cache>, end - column);
      }
    }
    source = state;
  }
  if (is_aligned) end_streams();
}

}  // namespace

int64_t state_scratch_floats(int64_t key_dim) {
  return key_dim * kManyLanes * kLanes + 4 * padded(kRowsTogether * key_dim);
}

void delta_rule(const StateHead& head, const StateHeadRows& rows, int64_t begin, int64_t end,
                float* scratch) {
  if (head.channel_biases != nullptr) {
    run_rule<Rule::Channels>(head, rows, begin, end, scratch);
  } else {
    run_rule<Rule::Delta>(head, rows, begin, end, scratch);
  }
}

void mamba2(const StateHead& head, const StateHeadRows& rows, int64_t begin, int64_t end,
            float* scratch) {
  run_rule<Rule::Mamba2>(head, rows, begin, end, scratch);
}

}  // namespace ts
