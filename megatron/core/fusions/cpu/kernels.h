// All kernels for one instruction set; the including file defines LANES and the namespace.

#include "vector.h"

INLINE float at(const float* x, int64_t i) { return x[i]; }
INLINE float at(const bf16* x, int64_t i) { return load(x + i, 1)[0]; }

#include "elementwise.h"
#include "rows.h"
#include "adam.h"
#include "small_linear.h"
#include "quantized_rows.h"
#include "paged_attention.h"

template <class Act, class T, class Add>
void add_activation(const std::string& name, Add add) {
    add(name, act_forward<Act, T>);
    add(name + "_backward", act_backward<Act, T>);
    add(name + "_glu", glu_forward<Act, T>);
    add(name + "_glu_backward", glu_backward<Act, T>);
}

template <class T>
void add_kernels(Kernels& found, const std::string& format) {
    const auto add = [&](const std::string& name, Kernel kernel) { found[name + format] = kernel; };
    add_activation<Silu, T>("silu", add);
    add_activation<Gelu, T>("gelu", add);
    add_activation<GeluTanh, T>("openai_gelu", add);
    add_activation<QuickGelu, T>("quick_gelu", add);
    add_activation<SquaredRelu, T>("squared_relu", add);
    add("add", sum_of_two<T>);
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
    add("rotate", rotate<T>);
    add("adam", adam<Whole, Whole, T>);
    add("adam mean", adam<Rounded, Whole, T>);
    add("adam square", adam<Whole, Rounded, T>);
    add("adam mean square", adam<Rounded, Rounded, T>);
    add("sum_of_pieces", sum_of_pieces<T>);
    add("sum_of_rows", sum_of_rows<T>);
    add("sums_of_squares", sums_of_squares<T>);
    add("small_linear", small_linear<T>);
    add("quantize_rows", quantize_rows<T>);
    add("store_rows", store_rows<T>);
    add("paged_attention", paged_attention<T>);
}

Kernels kernels() {
    Kernels found;
    add_kernels<float>(found, " float32");
    add_kernels<bf16>(found, " bfloat16");
    found["small_linear int8"] = small_linear<int8_t>;
    found["paged_attention int8"] = paged_attention<int8_t>;
    return found;
}
