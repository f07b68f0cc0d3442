// AdamW in one pass over gradient, both moments, parameter and the 16-bit weight of the model.

// A parameter or moment in float.
struct Whole {
    using Number = float;
    float* values;
    INLINE F get(int64_t i, int64_t n) const { return load(values + i, n); }
    INLINE void put(int64_t i, int64_t n, F f, I) const { store(values + i, f, n); }
};

// A moment in bfloat16 with stochastic rounding, for which `chance` is the random value; see
// optimizer/reduced_precision_state.py.
struct Rounded {
    using Number = bf16;
    bf16* values;
    INLINE F get(int64_t i, int64_t n) const { return load(values + i, n); }
    INLINE void put(int64_t i, int64_t n, F f, I chance) const {
        const I before = ((I)get(i, n)) >> 16;
        const I noise = (((before * 0x9E3779B) ^ chance) * 0x27D4EB2F) >> 16 & 0xffff;
        const U upper = (U)((I)f + noise) >> 16;
        write(&values[i].bits, __builtin_convertvector(upper, H), n);
    }
};

// A float main parameter: its upper half, rounded, is the bfloat16 weight, and a separate tensor
// holds its lower 16 bits.
struct Split {
    bf16* upper;
    uint16_t* lower;
    INLINE F get(int64_t i, int64_t n) const {
        const I low = (I)(__builtin_convertvector(read<H>(lower + i, n), U) << 16) >> 16;
        return (F)((I)load(upper + i, n) + low);
    }
    INLINE void put(int64_t i, int64_t n, F f, I) const {
        const U bits = (U)f;
        write(&upper[i].bits, __builtin_convertvector((bits + 0x8000) >> 16, H), n);
        write(lower + i, __builtin_convertvector(bits & 0xffff, H), n);
    }
};

// Pointers: parameter, its lower 16 bits (optional), gradient, first moment, second moment,
// bfloat16 weight to write (optional).  Sizes: step number.  Numbers: divisor of the gradient,
// 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, square root of the second bias correction, eps,
// lr / first bias correction.
template <class Grad, class Param, class Mean, class Squares>
INLINE void adam_loop(const Call& c, int64_t begin, int64_t end, Param param, Mean mean,
                      Squares squares) {
    const Grad* grads = c.at<Grad>(2);
    bf16* weight = c.at<bf16>(5);
    const auto& k = c.numbers;
    const I chance_of_step = I{} + (int32_t)((uint32_t)c.sizes[0] * 0x2545F491u);
    each(end - begin, [&](int64_t j, int64_t n) {
        const int64_t i = begin + j;
        const F before = param.get(i, n), grad = load(grads + i, n) / k[0];
        const I chance = (((I)before >> 16) + chance_of_step) * 0x165667B1;
        F m = mean.get(i, n), v = squares.get(i, n);
        m += (grad - m) * k[2];
        v = v * k[3] + (grad * grad) * k[4];
        mean.put(i, n, m, chance);
        squares.put(i, n, v, chance);
        const F after = before * k[1] - (m * k[7]) / (square_root(v) / k[5] + k[6]);
        param.put(i, n, after, chance);
        if (weight) store(weight + i, after, n);
    });
}

template <class Mean, class Squares, class Grad>
void adam(const Call& c, int64_t begin, int64_t end) {
    const Mean mean{c.at<typename Mean::Number>(3)};
    const Squares squares{c.at<typename Squares::Number>(4)};
    if (c.pointers[1])
        adam_loop<Grad>(c, begin, end, Split{c.at<bf16>(0), c.at<uint16_t>(1)}, mean, squares);
    else
        adam_loop<Grad>(c, begin, end, Whole{c.at<float>(0)}, mean, squares);
}
