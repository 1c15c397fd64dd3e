// The columns of a `SampleRow` (sample.h): type and name. A new sampling option adds its column
// here and in `ROW` of src/twostroke/backends/sampling/rows.py, which mirrors this list.
//
// This file is included wherever `TS_COLUMN` is defined: for the struct, and for the hash of the
// list, by which Python refuses libraries that were compiled from another list (exports.cpp).
TS_COLUMN(const int32_t*, tokens);  // prompt, then output; read only with a penalty
TS_COLUMN(const int32_t*, bias_ids);
TS_COLUMN(const float*, bias_values);
TS_COLUMN(const int32_t*, barred_ids);  // never drawn: end tokens while min_tokens is not reached
TS_COLUMN(const uint32_t*, mask);  // a bit a token, lowest first: may it be drawn? null: all may
TS_COLUMN(uint64_t, seed);
TS_COLUMN(uint64_t, counter);  // index of the output token that is drawn
TS_COLUMN(int64_t, num_tokens);
TS_COLUMN(int64_t, num_prompt);
TS_COLUMN(double, temperature);  // 0: greedy
TS_COLUMN(double, top_p);        // 1: all
TS_COLUMN(double, min_p);        // 0: all
TS_COLUMN(float, repetition_penalty);
TS_COLUMN(float, frequency_penalty);
TS_COLUMN(float, presence_penalty);
TS_COLUMN(int32_t, top_k);  // 0: all
TS_COLUMN(int32_t, num_bias);
TS_COLUMN(int32_t, num_barred);
TS_COLUMN(int32_t, num_logprobs);  // -1: none; 0: the token's alone; at most kMaxLogprobs
TS_COLUMN(int32_t, given);         // a token to report on, as if drawn; kNoToken: draw one
