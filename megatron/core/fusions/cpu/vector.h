// Vectors of kLanes floats: loads, stores and functions.  Included once per instruction set.
//
// The result for an element never depends on its position: the last elements of a row, fewer than
// kLanes, go through the same instructions in a padded vector.  Macros like __AVX512F__ cannot be
// used: g++ preprocesses the complete file before it applies the target pragmas.

constexpr int64_t kLanes = LANES;
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));
typedef int8_t B __attribute__((vector_size(LANES)));

INLINE F splat(float x) { return F{} + x; }

// Multiply-add in one expression, so that the compiler contracts it alike for all vector widths.
INLINE F poly(F x, F high, float low) { return high * x + low; }

INLINE F widen(H h) {
#if LANES == 16
    return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif LANES == 8
    return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
    return (F)(__builtin_convertvector(h, U) << 16);
#endif
}

// Round to nearest, ties to even; NaN stays NaN.
INLINE H narrow(F f) {
#ifdef HAS_BF16  // flushes values below 1e-38 to zero
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

// Load or store n <= kLanes elements; the rest of a loaded vector is zero.
INLINE F cached(const float* p, int64_t n) { return read<F>(p, n); }
INLINE F cached(const bf16* p, int64_t n) { return widen(read<H>(&p->bits, n)); }
INLINE void cache(float* p, F f, int64_t n) { write(p, f, n); }
INLINE void cache(bf16* p, F f, int64_t n) { write(&p->bits, narrow(f), n); }

// The same with a prefetch, for streams that the hardware does not prefetch early enough.  On one
// core of a server it overlaps arithmetic and memory access, which otherwise alternate.
constexpr int64_t kAhead = 2048;  // bytes; the fastest of 1, 2 and 4 KiB
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

// Call body(i, n) for consecutive groups of n <= kLanes elements, of which i is the first.
template <class Body>
INLINE void each(int64_t count, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) body(i, kLanes);
    if (i < count) body(i, count - i);
}

// Return the first n lanes of x, with `instead` in the other lanes.
INLINE F first(F x, int64_t n, float instead) {
    if (n < kLanes)
        for (int64_t i = n; i < kLanes; ++i) x[i] = instead;
    return x;
}

// Sum of all lanes, pairwise by halves.
INLINE float sum(F x) {
#if LANES == 16  // compilers would go through memory
    const __m512d bits = (__m512d)x;
    const __m256 eight = _mm256_add_ps((__m256)_mm512_castpd512_pd256(bits),
                                       (__m256)_mm512_extractf64x4_pd(bits, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    for (int64_t half = kLanes / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
#endif
}

// Sum of body(i, n) over consecutive groups of n <= kLanes elements, of which i is the first.
template <class Body>
INLINE float sum_over(int64_t count, Body body) {
    F parts[4] = {};  // four sums: one would serialize the loop
    int64_t i = 0;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes)
        for (int j = 0; j < 4; ++j) parts[j] += body(i + j * kLanes, kLanes);
    each(count - i, [&](int64_t k, int64_t n) { parts[0] += body(i + k, n); });
    return sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

// If an operand is NaN, the result is the second one.  With other rules for NaN, compilers would
// need two instructions (compare, select).
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
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int64_t i = 1; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
    return top;
#endif
}

// e^x with relative error 1e-7 (1 + |x|) for -87 <= x <= 88; 0 below, inf above; NaN for NaN.
INLINE F exp(F x) {
    const F doublings = x * 1.44269504f;
#if LANES == 16  // the fraction of inf is 0
    const F r = (F)_mm512_reduce_ps((__m512)doublings, 0x08);
    const F whole = doublings - r;
#else
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
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

// 1 / x for x > 0, including inf.
INLINE F reciprocal(F x) {
#if LANES == 16  // 14-bit estimate and one Newton step; division takes three times as long
    const F guess = (F)_mm512_rcp14_ps((__m512)x);
    return guess + guess * smaller(1.0f - x * guess, splat(1.0f));  // for 0 * inf = NaN: 1
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
