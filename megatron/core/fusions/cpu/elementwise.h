// Activations of the MLP, forward and backward, and the addition of 16-bit numbers to 32-bit ones.

// Each activation gives its value at x, and its slope beside it.
struct Silu {
    static INLINE F value(F x) { return x * sigmoid(x); }
    static INLINE F slope(F x, F& value) {
        const F s = sigmoid(x);
        value = x * s;
        return s + value * (1.0f - s);
    }
};

// x times the probability that a normal variable is below x.
struct Gelu {
    // That probability to 1e-7 of itself, and e^(-x^2/2).
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

// The tanh form: x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)).
struct GeluTanh {
    static INLINE F value(F x) { return x * sigmoid(x * (x * x * 0.0713548163f + 1.59576912f)); }
    static INLINE F slope(F x, F& value) {
        const F square = x * x;
        const F s = sigmoid(x * (square * 0.0713548163f + 1.59576912f));
        value = x * s;
        return s + value * (1.0f - s) * (square * 0.214064449f + 1.59576912f);
    }
};

// x, y
template <class Act, class T>
void act_forward(const Call& c, int64_t begin, int64_t end) {
    const T* x = c.at<T>(0) + begin;
    T* y = c.at<T>(1) + begin;
    each(end - begin, [&](int64_t i, int64_t n) { store(y + i, Act::value(load(x + i, n)), n); });
}

// x, grad of y, grad of x
template <class Act, class T>
void act_backward(const Call& c, int64_t begin, int64_t end) {
    const T *x = c.at<T>(0) + begin, *grad = c.at<T>(1) + begin;
    T* out = c.at<T>(2) + begin;
    each(end - begin, [&](int64_t i, int64_t n) {
        F value;
        store(out + i, load(grad + i, n) * Act::slope(load(x + i, n), value), n);
    });
}

// gate and up side by side [rows, 2 width], y [rows, width]; sizes: width
template <class Act, class T>
void glu_forward(const Call& c, int64_t begin, int64_t end) {
    const int64_t width = c.sizes[0];
    for (int64_t row = begin; row < end; ++row) {
        const T *gate = c.at<T>(0) + 2 * row * width, *up = gate + width;
        T* y = c.at<T>(1) + row * width;
        each(width, [&](int64_t i, int64_t n) {
            store(y + i, Act::value(load(gate + i, n)) * load(up + i, n), n);
        });
    }
}

// gate and up, grad of y, grad of gate and up; sizes: width
template <class Act, class T>
void glu_backward(const Call& c, int64_t begin, int64_t end) {
    const int64_t width = c.sizes[0];
    for (int64_t row = begin; row < end; ++row) {
        const T *gate = c.at<T>(0) + 2 * row * width, *up = gate + width;
        const T* grad = c.at<T>(1) + row * width;
        T *grad_gate = c.at<T>(2) + 2 * row * width, *grad_up = grad_gate + width;
        each(width, [&](int64_t i, int64_t n) {
            const F g = load(grad + i, n);
            F value;
            const F slope = Act::slope(load(gate + i, n), value);
            store(grad_gate + i, g * load(up + i, n) * slope, n);
            store(grad_up + i, g * value, n);
        });
    }
}

// total (float), what is added to it
template <class T>
void add_into(const Call& c, int64_t begin, int64_t end) {
    float* total = c.at<float>(0) + begin;
    const T* more = c.at<T>(1) + begin;
    each(end - begin, [&](int64_t i, int64_t n) {
        store(total + i, load(total + i, n) + load(more + i, n), n);
    });
}
