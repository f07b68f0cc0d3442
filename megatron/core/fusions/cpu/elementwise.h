// MLP activations and rotary embeddings, forward and backward; addition of 16-bit to fp32 tensors.

// Each activation has value(x), and slope(x), which also returns the value.
struct Silu {
    static INLINE F value(F x) { return x * sigmoid(x); }
    static INLINE F slope(F x, F& value) {
        const F s = sigmoid(x);
        value = x * s;
        return s + value * (1.0f - s);
    }
};

// x * Phi(x), where Phi is the distribution function of the standard normal distribution.
struct Gelu {
    // Return Phi(x), with relative error 1e-7; set `bell` to e^(-x^2/2).
    static INLINE F below(F x, F& bell) {
        const F size = x < 0.0f ? -x : x;
        bell = exp(x * x * -0.5f);
        const F t = 1.0f / (1.0f + size * 0.3f);
        F p = poly(t, splat(0.0383342877f), -0.168952063f);
        p = poly(t, p, 0.228217497f);
        p = poly(t, p, -0.0759997964f);
        p = poly(t, p, 0.142185181f);
        p = poly(t, p, 0.0948329270f);
        p = poly(t, p, 0.121882066f);
        p = poly(t, p, 0.119493060f);
        p = poly(t, p, 6.85299210e-6f) * bell;
        return x < 0.0f ? p : 1.0f - p;
    }
    static INLINE F value(F x) {
        F bell;
        return x * below(x, bell);
    }
    static INLINE F slope(F x, F& value) {
        F bell;
        const F p = below(x, bell);
        value = x * p;
        return p + x * bell * 0.398942280f;
    }
};

// The tanh approximation of GELU: x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)).
struct GeluTanh {
    static INLINE F value(F x) { return x * sigmoid(x * (x * x * 0.0713548163f + 1.59576912f)); }
    static INLINE F slope(F x, F& value) {
        const F square = smaller(splat(1e10f), x * x);  // a slope of 0 times inf would be NaN
        const F s = sigmoid(x * (square * 0.0713548163f + 1.59576912f));
        value = x * s;
        return s + value * (1.0f - s) * (square * 0.214064449f + 1.59576912f);
    }
};

// Pointers: x, y.
template <class Act, class T>
void act_forward(const Call& c, int64_t begin, int64_t end) {
    const T* x = c.at<T>(0) + begin;
    T* y = c.at<T>(1) + begin;
    each(end - begin, [&](int64_t i, int64_t n) { store(y + i, Act::value(load(x + i, n)), n); });
}

// Pointers: x, grad of y, grad of x.
template <class Act, class T>
void act_backward(const Call& c, int64_t begin, int64_t end) {
    const T *x = c.at<T>(0) + begin, *grad = c.at<T>(1) + begin;
    T* out = c.at<T>(2) + begin;
    each(end - begin, [&](int64_t i, int64_t n) {
        F value;
        store(out + i, load(grad + i, n) * Act::slope(load(x + i, n), value), n);
    });
}

// x sigmoid(1.702 x)
struct QuickGelu {
    static INLINE F value(F x) { return x * sigmoid(x * 1.702f); }
    static INLINE F slope(F x, F& value) {
        const F s = sigmoid(x * 1.702f);
        value = x * s;
        return s + value * (1.0f - s) * 1.702f;
    }
};

struct SquaredRelu {
    static INLINE F value(F x) { return x < 0.0f ? F{} : x * x; }
    static INLINE F slope(F x, F& value) {
        value = SquaredRelu::value(x);
        return x < 0.0f ? F{} : x * 2.0f;
    }
};

// Input of a gated activation: rows [2 width] of x are the gate projection, then the up projection.
// The gate is clamped from above, up from both sides; then `offset` is added to up.
// Sizes: width.  Numbers: clamp or inf, offset.
template <class T>
struct Gated {
    const T *gates, *ups;
    float clamp, offset;

    INLINE Gated(const Call& c, int64_t row)
        : gates(c.at<T>(0) + 2 * row * c.sizes[0]),
          ups(gates + c.sizes[0]),
          clamp(c.numbers[0]),
          offset(c.numbers[1]) {}
    INLINE F gate(int64_t i, int64_t n) const {
        const F x = load(gates + i, n);
        return clamp < x ? splat(clamp) : x;
    }
    INLINE F up(int64_t i, int64_t n) const {
        const F x = load(ups + i, n), below = clamp < x ? splat(clamp) : x;
        return (-clamp > below ? splat(-clamp) : below) + offset;
    }
    INLINE F gate_passes(int64_t i, int64_t n, F grad) const {
        return load(gates + i, n) > clamp ? F{} : grad;
    }
    INLINE F up_passes(int64_t i, int64_t n, F grad) const {
        const F x = load(ups + i, n), size = x < 0.0f ? -x : x;
        return size > clamp ? F{} : grad;
    }
};

// Pointers: x, y [rows, width], weight of each row (float, optional).
template <class Act, class T>
void glu_forward(const Call& c, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const Gated<T> x(c, row);
        T* y = c.at<T>(1) + row * c.sizes[0];
        const float weight = c.pointers[2] ? c.at<float>(2)[row] : 1.0f;
        each(c.sizes[0], [&](int64_t i, int64_t n) {
            store(y + i, Act::value(x.gate(i, n)) * x.up(i, n) * weight, n);
        });
    }
}

// Pointers: x, grad of y, grad of x, weights and their gradients (float, optional).
template <class Act, class T>
void glu_backward(const Call& c, int64_t begin, int64_t end) {
    const int64_t width = c.sizes[0];
    for (int64_t row = begin; row < end; ++row) {
        const Gated<T> x(c, row);
        const T* grad = c.at<T>(1) + row * width;
        T *grad_gate = c.at<T>(2) + 2 * row * width, *grad_up = grad_gate + width;
        const float weight = c.pointers[3] ? c.at<float>(3)[row] : 1.0f;
        F along{};
        each(width, [&](int64_t i, int64_t n) {
            const F of_y = load(grad + i, n), g = of_y * weight, up = x.up(i, n);
            F value;
            const F slope = Act::slope(x.gate(i, n), value);
            along += of_y * value * up;
            store(grad_gate + i, x.gate_passes(i, n, g * up * slope), n);
            store(grad_up + i, x.up_passes(i, n, g * value), n);
        });
        if (c.pointers[4]) c.at<float>(4)[row] = sum(along);
    }
}

// Apply rotary embeddings; a unit is one token of one sequence.
//
// Pointers: x [tokens, sequences, heads, width], of which only the last dim must be contiguous;
// cosines and sines [tokens, 1 or sequences, angles]; y, like x but contiguous.  Sizes: sequences,
// heads, width, angles, the first three strides of x, whether the tables differ by sequence,
// whether pairs are neighbouring channels.  Numbers: sign of the angle (-1 for backward).
template <class T>
void rotate(const Call& c, int64_t begin, int64_t end) {
    const auto& s = c.sizes;
    const int64_t sequences = s[0], heads = s[1], width = s[2], angles = s[3];
    const float sign = c.numbers[0];
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t token = unit / sequences, sequence = unit % sequences;
        const int64_t place = (s[7] ? unit : token) * angles;
        const T *cosines = c.at<T>(1) + place, *sines = c.at<T>(2) + place;
        for (int64_t head = 0; head < heads; ++head) {
            const T* x = c.at<T>(0) + token * s[4] + sequence * s[5] + head * s[6];
            T* y = c.at<T>(3) + (unit * heads + head) * width;
            if (s[8]) {
                for (int64_t i = 0; i < angles; ++i) {
                    const float a = at(x, 2 * i), b = at(x, 2 * i + 1), cos = at(cosines, i);
                    const float sin = sign * at(sines, i);
                    store(y + 2 * i, splat(a * cos - b * sin), 1);
                    store(y + 2 * i + 1, splat(b * cos + a * sin), 1);
                }
            } else {
                each(angles, [&](int64_t i, int64_t n) {
                    const F a = load(x + i, n), b = load(x + angles + i, n);
                    const F cos = load(cosines + i, n), sin = load(sines + i, n) * sign;
                    store(y + i, a * cos - b * sin, n);
                    store(y + angles + i, b * cos + a * sin, n);
                });
            }
            std::memcpy(y + 2 * angles, x + 2 * angles, (width - 2 * angles) * sizeof(T));
        }
    }
}

// Pointers: total (float), tensor to add to it.
template <class T>
void add_into(const Call& c, int64_t begin, int64_t end) {
    float* total = c.at<float>(0) + begin;
    const T* more = c.at<T>(1) + begin;
    each(end - begin, [&](int64_t i, int64_t n) {
        store(total + i, load(total + i, n) + load(more + i, n), n);
    });
}

// Pointers: x, y, x + y.
template <class T>
void sum_of_two(const Call& c, int64_t begin, int64_t end) {
    const T *x = c.at<T>(0) + begin, *y = c.at<T>(1) + begin;
    T* out = c.at<T>(2) + begin;
    each(end - begin, [&](int64_t i, int64_t n) {
        store(out + i, load(x + i, n) + load(y + i, n), n);
    });
}
