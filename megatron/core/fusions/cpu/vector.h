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
INLINE F load(const float* p, int64_t n) { return read<F>(p, n); }
INLINE F load(const bf16* p, int64_t n) { return widen(read<H>(&p->bits, n)); }
INLINE void store(float* p, F f, int64_t n) { write(p, f, n); }
INLINE void store(bf16* p, F f, int64_t n) { write(&p->bits, narrow(f), n); }

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

INLINE float sum(F x) {
    float total = 0;
    for (int64_t i = 0; i < kLanes; ++i) total += x[i];
    return total;
}

INLINE F larger(F a, F b) { return a > b ? a : b; }

INLINE float largest(F x) {
    float top = x[0];
    for (int64_t i = 1; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
    return top;
}

// e^x to 1e-7 of itself, for -87 <= x <= 88; 0 below, no more than e^88 above; NaN for NaN.
INLINE F exp(F x) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
    const F limited = 88.0f < x ? splat(88.0f) : x;
    const F in_range = -104.0f > limited ? splat(-104.0f) : limited;
    const F shifted = in_range * 1.44269504f + kMagic;
    const F whole = shifted - kMagic;
    const F r = in_range - whole * 0.693145752f - whole * 1.42860677e-6f;
    F p = poly(r, splat(0.00138144672f), 0.00836878084f);
    p = poly(r, p, 0.0416683927f);
    p = poly(r, p, 0.166665196f);
    p = poly(r, p, 0.49999994f);
    const F fraction = p * (r * r) + (r + 1.0f);
#if LANES == 16
    return (F)_mm512_scalef_ps((__m512)fraction, (__m512)whole);
#endif
    const F power = (F)(((I)shifted << 23) + 0x3f800000);
    return x < -87.0f ? F{} : fraction * power;
}

INLINE F sigmoid(F x) { return 1.0f / (1.0f + exp(-x)); }

INLINE F square_root(F x) {
#if LANES == 16
    return (F)_mm512_sqrt_ps((__m512)x);
#else
    F y;
    for (int64_t i = 0; i < kLanes; ++i) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}
