// All kernels of one instruction set, whose LANES and namespace surround this file.

#include "vector.h"

INLINE float at(const float* x, int64_t i) { return x[i]; }
INLINE float at(const bf16* x, int64_t i) { return load(x + i, 1)[0]; }

#include "elementwise.h"
#include "rows.h"

template <class T>
void add_kernels(Kernels& found, const std::string& format) {
    const auto add = [&](const char* name, Kernel kernel) { found[name + format] = kernel; };
    add("silu", act_forward<Silu, T>);
    add("silu_backward", act_backward<Silu, T>);
    add("gelu", act_forward<Gelu, T>);
    add("gelu_backward", act_backward<Gelu, T>);
    add("gelu_tanh", act_forward<GeluTanh, T>);
    add("gelu_tanh_backward", act_backward<GeluTanh, T>);
    add("silu_glu", glu_forward<Silu, T>);
    add("silu_glu_backward", glu_backward<Silu, T>);
    add("gelu_glu", glu_forward<Gelu, T>);
    add("gelu_glu_backward", glu_backward<Gelu, T>);
    add("gelu_tanh_glu", glu_forward<GeluTanh, T>);
    add("gelu_tanh_glu_backward", glu_backward<GeluTanh, T>);
    add("add_into", add_into<T>);
    add("own_sums", own_sums<T>);
    add("gradients_of_log_sums", gradients_of_log_sums<T>);
    add("cross_entropy", cross_entropy<T>);
    add("causal_softmax", causal_softmax<T>);
    add("causal_softmax_backward", causal_softmax_backward<T>);
    add("layer_norm", norm_forward<false, T>);
    add("layer_norm_backward", norm_backward<false, T>);
    add("rms_norm", norm_forward<true, T>);
    add("rms_norm_backward", norm_backward<true, T>);
    add("sum_of_pieces", sum_of_pieces<T>);
}

Kernels kernels() {
    Kernels found;
    add_kernels<float>(found, " float32");
    add_kernels<bf16>(found, " bfloat16");
    return found;
}
