// AVX-512 on AVX2: what the kernels of levels 2 and 3 use of its intrinsics, for tests.
//
// Included before everything else (CMakeLists.txt), so that the kernels' sources compile as they
// are and run on any processor with AVX2, FMA and F16C. Each function does what Intel's manual says
// of its instruction: where it rounds, wraps, reads or faults. An intrinsic that is missing here
// does not compile.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace ts::emulated {

// GCC's vectors: operators go number by number, and integers without a sign wrap.
template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(64), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::Type;
using Floats = Vector<float>;
using Words = Vector<uint16_t>;
using Doublewords = Vector<uint32_t>;
using Integers = Vector<int32_t>;
using Bytes = Vector<uint8_t>;

#define TS_EMULATED static inline __attribute__((always_inline))
// Not inlined: kernels that are unrolled would take minutes to compile.
#define TS_EMULATED_APART [[maybe_unused]] static __attribute__((noinline))

template <class To, class From>
TS_EMULATED To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
TS_EMULATED __m512i integer(Vector<T> v) {
  return bits<__m512i>(v);
}

// Memory: an aligned access faults at any other address, here as there.

TS_EMULATED void check_aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) __builtin_trap();
}

TS_EMULATED __m512i loadu_si512(const void* p) {
  __m512i v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
TS_EMULATED __m512i load_si512(const void* p) {
  check_aligned(p);
  return loadu_si512(p);
}
TS_EMULATED void store_si512(void* p, __m512i v) {
  check_aligned(p);
  std::memcpy(p, &v, sizeof v);
}
TS_EMULATED __m512 loadu_ps(const void* p) { return bits<__m512>(loadu_si512(p)); }
TS_EMULATED void storeu_ps(void* p, __m512 v) { std::memcpy(p, &v, sizeof v); }

/// What the mask leaves out is zero, and is not read.
TS_EMULATED_APART __m512 maskz_loadu_ps(__mmask16 mask, const void* p) {
  __m512 v = {};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) v[i] = static_cast<const float*>(p)[i];
  }
  return v;
}
TS_EMULATED_APART void mask_storeu_ps(void* p, __mmask16 mask, __m512 v) {
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) static_cast<float*>(p)[i] = v[i];
  }
}

// The same in all lanes, and parts.

TS_EMULATED __m512 setzero_ps() { return __m512{}; }
TS_EMULATED __m512i setzero_si512() { return __m512i{}; }
TS_EMULATED __m512 set1_ps(float value) {
  __m512 v;
  for (int i = 0; i < 16; ++i) v[i] = value;
  return v;
}
TS_EMULATED __m512d set1_pd(double value) { return value + __m512d{}; }
TS_EMULATED __m512i set1_epi32(int value) { return integer<int32_t>(value + Integers{}); }
TS_EMULATED __m512i set1_epi8(char value) {
  return integer<uint8_t>(static_cast<uint8_t>(value) + Bytes{});
}
/// The last argument is the lowest lane.
template <class... Rest>
TS_EMULATED __m512i set_epi32(Rest... values) {
  static_assert(sizeof...(values) == 16);
  const int32_t highest_first[] = {values...};
  Integers v;
  for (int i = 0; i < 16; ++i) v[i] = highest_first[15 - i];
  return integer<int32_t>(v);
}
TS_EMULATED __m512i broadcast_i32x4(__m128i part) {
  const __m128i parts[] = {part, part, part, part};
  return bits<__m512i>(parts);
}
TS_EMULATED __m256 half_of(__m512 v, int half) {
  __m256 part;
  std::memcpy(&part, reinterpret_cast<const char*>(&v) + 32 * half, sizeof part);
  return part;
}
TS_EMULATED __m512 join(__m256 low, __m256 high) {
  const __m256 halves[] = {low, high};
  return bits<__m512>(halves);
}
TS_EMULATED __m256 castps512_ps256(__m512 v) { return half_of(v, 0); }
TS_EMULATED __m256 extractf32x8_ps(__m512 v, int half) { return half_of(v, half & 1); }
TS_EMULATED __m512 castpd_ps(__m512d v) { return bits<__m512>(v); }
TS_EMULATED __m512 castsi512_ps(__m512i v) { return bits<__m512>(v); }
TS_EMULATED __m512i castps_si512(__m512 v) { return bits<__m512i>(v); }

// Floats: MXCSR holds, since these become instructions of AVX2.

TS_EMULATED __m512 add_ps(__m512 a, __m512 b) { return a + b; }
TS_EMULATED __m512 sub_ps(__m512 a, __m512 b) { return a - b; }
TS_EMULATED __m512 mul_ps(__m512 a, __m512 b) { return a * b; }
TS_EMULATED __m512 div_ps(__m512 a, __m512 b) { return a / b; }
TS_EMULATED __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return join(_mm256_fmadd_ps(half_of(a, 0), half_of(b, 0), half_of(c, 0)),
              _mm256_fmadd_ps(half_of(a, 1), half_of(b, 1), half_of(c, 1)));
}
/// The second operand where either is NaN, or both are zeros.
TS_EMULATED __m512 max_ps(__m512 a, __m512 b) {
  return join(_mm256_max_ps(half_of(a, 0), half_of(b, 0)),
              _mm256_max_ps(half_of(a, 1), half_of(b, 1)));
}
TS_EMULATED __m512 min_ps(__m512 a, __m512 b) {
  return join(_mm256_min_ps(half_of(a, 0), half_of(b, 0)),
              _mm256_min_ps(half_of(a, 1), half_of(b, 1)));
}
template <int Predicate>
TS_EMULATED __mmask16 cmp_ps_mask(__m512 a, __m512 b) {
  static_assert(Predicate == _CMP_NLT_UQ, "no other is emulated");
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (a[i] < b[i] ? 0U : 1U) << i;
  return static_cast<__mmask16>(mask);
}
TS_EMULATED_APART __m512 mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 v) {
  for (int i = 0; i < 16; ++i) v[i] = mask >> i & 1 ? v[i] : otherwise[i];
  return v;
}
TS_EMULATED __m512 maskz_mov_ps(__mmask16 mask, __m512 v) {
  return mask_mov_ps(setzero_ps(), mask, v);
}

// Conversions.

TS_EMULATED __m512 cvtepi32_ps(__m512i v) {
  return bits<__m512>(__builtin_convertvector(bits<Integers>(v), Floats));
}
TS_EMULATED __m512i cvtepi16_epi32(__m256i v) {
  const __m256i halves[] = {_mm256_cvtepi16_epi32(_mm256_castsi256_si128(v)),
                            _mm256_cvtepi16_epi32(_mm256_extracti128_si256(v, 1))};
  return bits<__m512i>(halves);
}
TS_EMULATED __m512 cvtph_ps(__m256i halves) {
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
              _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}
template <int Rounding>
TS_EMULATED __m256i cvtps_ph(__m512 v) {
  return _mm256_set_m128i(_mm256_cvtps_ph(half_of(v, 1), Rounding),
                          _mm256_cvtps_ph(half_of(v, 0), Rounding));
}
/// Sixteen numbers of type T, each as 32 bits.
template <class T, class Source>
TS_EMULATED __m512i widen(Source source) {
  static_assert(sizeof(Source) == 16 * sizeof(T));
  T numbers[16];
  std::memcpy(numbers, &source, sizeof numbers);
  Integers v;
  for (int i = 0; i < 16; ++i) v[i] = numbers[i];
  return integer<int32_t>(v);
}
TS_EMULATED __m512i cvtepi8_epi32(__m128i v) { return widen<int8_t>(v); }
TS_EMULATED __m512i cvtepu8_epi32(__m128i v) { return widen<uint8_t>(v); }
TS_EMULATED __m512i cvtepu16_epi32(__m256i v) { return widen<uint16_t>(v); }
/// Keeps the lowest byte of each number: it wraps.
TS_EMULATED __m256i cvtepi32_epi16(__m512i v) {
  const auto numbers = bits<Doublewords>(v);
  uint16_t low[16];
  for (int i = 0; i < 16; ++i) low[i] = static_cast<uint16_t>(numbers[i]);
  return bits<__m256i>(low);
}
/// To the nearest integer, halves to even; the least one where there is none.
TS_EMULATED __m512i cvtps_epi32(__m512 v) {
  __m256 halves[2];
  std::memcpy(halves, &v, sizeof v);
  const __m256i rounded[2] = {_mm256_cvtps_epi32(halves[0]), _mm256_cvtps_epi32(halves[1])};
  return bits<__m512i>(rounded);
}
TS_EMULATED_APART __m128i cvtepi32_epi8(__m512i v) {
  const auto numbers = bits<Doublewords>(v);
  uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(numbers[i]);
  __m128i result;
  std::memcpy(&result, bytes, sizeof result);
  return result;
}
/// To the nearest, halves to even, whatever MXCSR says; denormals are zeros, NaNs become quiet.
TS_EMULATED uint16_t bfloat16_from(uint32_t number) {
  const uint32_t size = number & 0x7fffffff;
  if (size < 0x00800000) return static_cast<uint16_t>(number >> 16 & 0x8000);
  if (size > 0x7f800000) return static_cast<uint16_t>(number >> 16 | 0x40);
  return static_cast<uint16_t>((number + 0x7fff + (number >> 16 & 1)) >> 16);
}
/// `low` makes the lower sixteen.
TS_EMULATED_APART __m512i cvtne2ps_pbh(__m512 high, __m512 low) {
  const auto lower = bits<Doublewords>(low);
  const auto upper = bits<Doublewords>(high);
  Words v;
  for (int i = 0; i < 16; ++i) {
    v[i] = bfloat16_from(lower[i]);
    v[16 + i] = bfloat16_from(upper[i]);
  }
  return integer<uint16_t>(v);
}

// Integers.

TS_EMULATED __m512i add_epi32(__m512i a, __m512i b) {
  return integer<uint32_t>(bits<Doublewords>(a) + bits<Doublewords>(b));
}
TS_EMULATED __m512i sub_epi32(__m512i a, __m512i b) {
  return integer<uint32_t>(bits<Doublewords>(a) - bits<Doublewords>(b));
}
TS_EMULATED __m512i mullo_epi32(__m512i a, __m512i b) {
  return integer<uint32_t>(bits<Doublewords>(a) * bits<Doublewords>(b));
}
TS_EMULATED __m512i sub_epi8(__m512i a, __m512i b) {
  return integer<uint8_t>(bits<Bytes>(a) - bits<Bytes>(b));
}
TS_EMULATED __m512i add_epi8(__m512i a, __m512i b) {
  return integer<uint8_t>(bits<Bytes>(a) + bits<Bytes>(b));
}
TS_EMULATED __m512i and_si512(__m512i a, __m512i b) { return a & b; }
TS_EMULATED __m512i or_si512(__m512i a, __m512i b) { return a | b; }

/// Shifts by as many bits as there are, or more, leave nothing; of a sign, only that.
TS_EMULATED __m512i slli_epi32(__m512i v, unsigned count) {
  return count > 31 ? setzero_si512() : integer<uint32_t>(bits<Doublewords>(v) << count);
}
TS_EMULATED __m512i srli_epi32(__m512i v, unsigned count) {
  return count > 31 ? setzero_si512() : integer<uint32_t>(bits<Doublewords>(v) >> count);
}
TS_EMULATED __m512i srai_epi32(__m512i v, unsigned count) {
  return integer<int32_t>(bits<Integers>(v) >> static_cast<int>(count > 31 ? 31 : count));
}
TS_EMULATED __m512i slli_epi16(__m512i v, unsigned count) {
  return count > 15 ? setzero_si512()
                    : integer<uint16_t>(bits<Words>(v) << static_cast<uint16_t>(count));
}
TS_EMULATED __m512i srli_epi16(__m512i v, unsigned count) {
  return count > 15 ? setzero_si512()
                    : integer<uint16_t>(bits<Words>(v) >> static_cast<uint16_t>(count));
}
TS_EMULATED int reduce_add_epi32(__m512i v) {
  const auto numbers = bits<Doublewords>(v);
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += numbers[i];
  return static_cast<int>(sum);
}
/// VPDPBUSD: four unsigned bytes x four signed ones to each sum, which wraps.
TS_EMULATED_APART __m512i dpbusd_epi32(__m512i sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  uint8_t a[64];
  int8_t b[64];
  std::memcpy(a, &unsigned_bytes, sizeof a);
  std::memcpy(b, &signed_bytes, sizeof b);
  auto result = bits<Doublewords>(sums);
  for (int i = 0; i < 16; ++i) {
    int32_t dot = 0;
    for (int k = 4 * i; k < 4 * i + 4; ++k) dot += a[k] * b[k];
    result[i] += static_cast<uint32_t>(dot);
  }
  return integer<uint32_t>(result);
}

/// VPDPWSSD: two words x two words to each sum, which wraps.
TS_EMULATED_APART __m512i dpwssd_epi32(__m512i sums, __m512i x, __m512i y) {
  int16_t a[32];
  int16_t b[32];
  std::memcpy(a, &x, sizeof a);
  std::memcpy(b, &y, sizeof b);
  auto result = bits<Doublewords>(sums);
  for (int i = 0; i < 16; ++i) {
    for (int k = 2 * i; k < 2 * i + 2; ++k) result[i] += static_cast<uint32_t>(a[k] * b[k]);
  }
  return integer<uint32_t>(result);
}

// Places.

/// Within each 16 bytes: an index's low four bits, or zero where its highest is set.
TS_EMULATED_APART __m512i shuffle_epi8(__m512i v, __m512i indices) {
  const auto bytes = bits<Bytes>(v);
  const auto index = bits<Bytes>(indices);
  Bytes result;
  for (int i = 0; i < 64; ++i)
    result[i] = index[i] & 0x80 ? 0 : bytes[(i & 0x30) | (index[i] & 15)];
  return integer<uint8_t>(result);
}
TS_EMULATED_APART __m512i permutexvar_epi16(__m512i indices, __m512i v) {
  const auto words = bits<Words>(v);
  const auto index = bits<Words>(indices);
  Words result;
  for (int i = 0; i < 32; ++i) result[i] = words[index[i] & 31];
  return integer<uint16_t>(result);
}
/// Within each four floats, two bits of `control` for each place.
TS_EMULATED_APART __m512 permute_ps(__m512 v, unsigned control) {
  __m512 result;
  for (int i = 0; i < 16; ++i) result[i] = v[(i & 12) | (control >> 2 * (i & 3) & 3)];
  return result;
}
/// Fours of floats: the lower two of `a`, the upper two of `b`.
TS_EMULATED_APART __m512 shuffle_f32x4(__m512 a, __m512 b, unsigned control) {
  __m512 result;
  for (int i = 0; i < 16; ++i) {
    const int from = static_cast<int>(control >> 2 * (i / 4) & 3) * 4 + i % 4;
    result[i] = i < 8 ? a[from] : b[from];
  }
  return result;
}

}  // namespace ts::emulated

#define _mm512_add_epi32 ts::emulated::add_epi32
#define _mm512_add_epi8 ts::emulated::add_epi8
#define _mm512_add_ps ts::emulated::add_ps
#define _mm512_and_si512 ts::emulated::and_si512
#define _mm512_broadcast_i32x4 ts::emulated::broadcast_i32x4
#define _mm512_castps512_ps256 ts::emulated::castps512_ps256
#define _mm512_castps_si512 ts::emulated::castps_si512
#define _mm512_castpd_ps ts::emulated::castpd_ps
#define _mm512_castsi512_ps ts::emulated::castsi512_ps
#define _mm512_cmp_ps_mask(a, b, predicate) ts::emulated::cmp_ps_mask<predicate>(a, b)
#define _mm512_cvtepi32_epi8 ts::emulated::cvtepi32_epi8
#define _mm512_cvtepi32_epi16 ts::emulated::cvtepi32_epi16
#define _mm512_cvtepi16_epi32 ts::emulated::cvtepi16_epi32
#define _mm512_cvtepi32_ps ts::emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi32 ts::emulated::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 ts::emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 ts::emulated::cvtepu8_epi32
#define _mm512_cvtne2ps_pbh ts::emulated::cvtne2ps_pbh
#define _mm512_cvtph_ps ts::emulated::cvtph_ps
#define _mm512_cvtps_ph(v, rounding) ts::emulated::cvtps_ph<rounding>(v)
#define _mm512_cvtps_epi32 ts::emulated::cvtps_epi32
#define _mm512_div_ps ts::emulated::div_ps
#define _mm512_dpbusd_epi32 ts::emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 ts::emulated::dpwssd_epi32
#define _mm512_extractf32x8_ps ts::emulated::extractf32x8_ps
#define _mm512_fmadd_ps ts::emulated::fmadd_ps
#define _mm512_load_si512 ts::emulated::load_si512
#define _mm512_loadu_ps ts::emulated::loadu_ps
#define _mm512_loadu_si512 ts::emulated::loadu_si512
#define _mm512_mask_mov_ps ts::emulated::mask_mov_ps
#define _mm512_mask_storeu_ps ts::emulated::mask_storeu_ps
#define _mm512_maskz_loadu_ps ts::emulated::maskz_loadu_ps
#define _mm512_maskz_mov_ps ts::emulated::maskz_mov_ps
#define _mm512_max_ps ts::emulated::max_ps
#define _mm512_min_ps ts::emulated::min_ps
#define _mm512_mul_ps ts::emulated::mul_ps
#define _mm512_mullo_epi32 ts::emulated::mullo_epi32
#define _mm512_or_si512 ts::emulated::or_si512
#define _mm512_permute_ps ts::emulated::permute_ps
#define _mm512_permutexvar_epi16 ts::emulated::permutexvar_epi16
#define _mm512_reduce_add_epi32 ts::emulated::reduce_add_epi32
#define _mm512_set1_pd ts::emulated::set1_pd
#define _mm512_set1_epi32 ts::emulated::set1_epi32
#define _mm512_set1_epi8 ts::emulated::set1_epi8
#define _mm512_set1_ps ts::emulated::set1_ps
#define _mm512_set_epi32 ts::emulated::set_epi32
#define _mm512_setzero_ps ts::emulated::setzero_ps
#define _mm512_setzero_si512 ts::emulated::setzero_si512
#define _mm512_shuffle_epi8 ts::emulated::shuffle_epi8
#define _mm512_shuffle_f32x4 ts::emulated::shuffle_f32x4
#define _mm512_slli_epi16 ts::emulated::slli_epi16
#define _mm512_slli_epi32 ts::emulated::slli_epi32
#define _mm512_srai_epi32 ts::emulated::srai_epi32
#define _mm512_srli_epi16 ts::emulated::srli_epi16
#define _mm512_srli_epi32 ts::emulated::srli_epi32
#define _mm512_store_si512 ts::emulated::store_si512
#define _mm512_storeu_ps ts::emulated::storeu_ps
#define _mm512_sub_epi8 ts::emulated::sub_epi8
#define _mm512_sub_epi32 ts::emulated::sub_epi32
#define _mm512_sub_ps ts::emulated::sub_ps
