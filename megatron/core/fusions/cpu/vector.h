// A few floats at a time: loads, stores and functions.  Included once per instruction set.
//
// What is done to an element never depends on where it lies: the last ones of a row, fewer than
// kLanes, go through the same instructions in a padded vector.  __AVX512F__ and the like are of no
// use here: g++ reads all of a file before it looks at the pragmas.

constexpr int64_t kLanes = LANES;
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));

INLINE F splat(float x) { return F{} + x; }

// fma, written out so that vectors of all widths are contracted alike.
INLINE F poly(F x, F high, float low) { return high * x + low; }

INLINE F widen(H h) {
#if LANES == 16
    return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
    return (F)(__builtin_convertvector(h, U) << 16);
#endif
}

// Rounded to nearest, ties to even; a NaN stays one.
INLINE H narrow(F f) {
#ifdef HAS_BF16  // numbers below 1e-38 become zero
    return (H)_mm512_cvtneps_pbh((__m512)f);
#endif
    const U u = (U)f;
    const U rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return __builtin_convertvector((f == f) ? rounded : U{} + 0x7fc0, H);
}

template <class V, class T>
INLINE V read(const T* p, int64_t n) {
    V v{};
    std::memcpy(&v, p, n == kLanes ? sizeof(V) : n * sizeof(T));
    return v;
}

template <class V, class T>
INLINE void write(T* p, V v, int64_t n) {
    std::memcpy(p, &v, n == kLanes ? sizeof(V) : n * sizeof(T));
}

// n <= kLanes elements; the rest of the vector is zero.
INLINE F cached(const float* p, int64_t n) { return read<F>(p, n); }
INLINE F cached(const bf16* p, int64_t n) { return widen(read<H>(&p->bits, n)); }
INLINE void cache(float* p, F f, int64_t n) { write(p, f, n); }
INLINE void cache(bf16* p, F f, int64_t n) { write(&p->bits, narrow(f), n); }

// The same where the processor does not ask for memory early enough by itself: on one core of a
// server arithmetic and memory take turns without this, and overlap with it.
constexpr int64_t kAhead = 2048;  // bytes; of 1, 2 and 4 KiB the best
template <class T>
INLINE F load(const T* p, int64_t n) {
    __builtin_prefetch((const char*)p + kAhead, 0);
    return cached(p, n);
}
template <class T>
INLINE void store(T* p, F f, int64_t n) {
    __builtin_prefetch((char*)p + kAhead, 1);
    cache(p, f, n);
}

// body(i, n) for stretches of n <= kLanes elements from i on.
template <class Body>
INLINE void each(int64_t count, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) body(i, kLanes);
    if (i < count) body(i, count - i);
}

// Only the first n lanes of x, the others `instead`.
INLINE F first(F x, int64_t n, float instead) {
    if (n < kLanes)
        for (int64_t i = n; i < kLanes; ++i) x[i] = instead;
    return x;
}

// By halves, not one after the other.
INLINE float sum(F x) {
    for (int64_t half = kLanes / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
}

// Sum of body(i, n) over stretches of n <= kLanes from i on.
template <class Body>
INLINE float sum_over(int64_t count, Body body) {
    F parts[4] = {};  // else each waits for the one before
    int64_t i = 0;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes)
        for (int j = 0; j < 4; ++j) parts[j] += body(i + j * kLanes, kLanes);
    each(count - i, [&](int64_t k, int64_t n) { parts[0] += body(i + k, n); });
    return sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

// Of a NaN and a number the second: else compilers compare and choose, in two steps.
#if LANES == 16
INLINE F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE F smaller(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
#elif LANES == 8
INLINE F larger(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE F smaller(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE F larger(F a, F b) { return a > b ? a : b; }
INLINE F smaller(F a, F b) { return a < b ? a : b; }
#endif

INLINE float largest(F x) {
    float top = x[0];
    for (int64_t i = 1; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
    return top;
}

// e^x to 1e-7 (1 + |x|) of itself, for -87 <= x <= 88; 0 below, inf above; NaN for NaN.
INLINE F exp(F x) {
    const F doublings = x * 1.44269504f;
#if LANES == 16  // infinities leave no fraction
    const F r = (F)_mm512_reduce_ps((__m512)doublings, 0x08);
    const F whole = doublings - r;
#else
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
    const F in_range = larger(splat(-127.0f), smaller(splat(128.0f), doublings));
    const F shifted = in_range + kMagic;
    const F r = in_range - (shifted - kMagic);
#endif
    F p = poly(r, splat(0.00132647273f), 0.00967151299f);
    p = poly(r, p, 0.0555073358f);
    p = poly(r, p, 0.240222424f);
    p = poly(r, p, 0.693147004f);
    p = poly(r, p, 1.0f);
#if LANES == 16
    return (F)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    return p * (F)(((I)shifted << 23) + 0x3f800000);
#endif
}

// 1 / x for x > 0, also inf.
INLINE F reciprocal(F x) {
#if LANES == 16  // a guess of 14 bits, and a step of Newton; a division takes three times as long
    const F guess = (F)_mm512_rcp14_ps((__m512)x);
    return guess + guess * smaller(1.0f - x * guess, splat(1.0f));  // NaN of 0 inf: the second
#else
    return 1.0f / x;
#endif
}

INLINE F sigmoid(F x) { return reciprocal(1.0f + exp(-x)); }

INLINE F square_root(F x) {
#if LANES == 16
    return (F)_mm512_sqrt_ps((__m512)x);
#else
    F y;
    for (int64_t i = 0; i < kLanes; ++i) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}
