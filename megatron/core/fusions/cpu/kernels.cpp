// Fused CPU kernels of a training step, compiled for several instruction sets.  The best one that
// the CPU supports is selected when the module is loaded.
//
// A kernel processes the units [begin, end) of a call; a unit is an element or a row.  A call is
// split into pieces of `grain` units, independent of the number of threads, and sums over pieces
// are added in their order.  So results are bitwise identical for any number of threads and from
// run to run.
//
// megatron/core/device/cpu_kernels.py is the only caller.  It passes tensors as addresses: the
// comment above each kernel lists its pointers, sizes and numbers in their order.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "call.h"

namespace py = pybind11;

namespace {

using Sets = std::vector<std::pair<std::string, Kernels>>;

// Return the instruction sets that this CPU supports, the best one first.
const Sets& usable() {
    static const Sets sets = [] {
        Sets found;
#ifdef __x86_64__
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        const bool has_avx512 =
            has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        if (has_avx512 && __builtin_cpu_supports("avx512bf16"))
            found.emplace_back("avx512_bf16", avx512_bf16_kernels());
        if (has_avx512) found.emplace_back("avx512", avx512_kernels());
        if (has_avx2) found.emplace_back("avx2", avx2_kernels());
#endif
        found.emplace_back("plain", plain_kernels());
        return found;
    }();
    return sets;
}

const Kernels* chosen = &usable().front().second;

void run(Kernel kernel, const Call& call, int64_t count, int64_t grain, int threads) {
    const int64_t pieces = (count + grain - 1) / grain;
    const auto work = [&](int64_t piece) {
        kernel(call, piece * grain, std::min(count, (piece + 1) * grain));
    };
    if (threads <= 1 || pieces <= 1) {
        for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
}

// Calls that are computed again, one behind the other, without returning to Python.
class Tape {
   public:
    void add(const std::string& name, Call call, int64_t count, int64_t grain, int threads) {
        steps.push_back({chosen->at(name), std::move(call), count, grain, threads});
    }
    void replay() const {
        for (const Step& s : steps) run(s.kernel, s.call, s.count, s.grain, s.threads);
    }

   private:
    struct Step {
        Kernel kernel;
        Call call;
        int64_t count, grain;
        int threads;
    };
    std::vector<Step> steps;
};

}  // namespace

PYBIND11_MODULE(kernels_cpp, m) {
    m.doc() = "Fused kernels on a CPU; see megatron/core/device/cpu_kernels.py.";
    m.def(
        "run",
        [](const std::string& name, std::vector<uintptr_t> pointers, std::vector<int64_t> sizes,
           std::vector<float> numbers, int64_t count, int64_t grain, int threads) {
            const Kernel kernel = chosen->at(name);
            const Call call{std::move(pointers), std::move(sizes), std::move(numbers)};
            py::gil_scoped_release release;
            run(kernel, call, count, grain, threads);
        });
    py::class_<Tape>(m, "Tape")
        .def(py::init<>())
        .def("add",
             [](Tape& tape, const std::string& name, std::vector<uintptr_t> pointers,
                std::vector<int64_t> sizes, std::vector<float> numbers, int64_t count,
                int64_t grain, int threads) {
                 tape.add(name, {std::move(pointers), std::move(sizes), std::move(numbers)}, count,
                          grain, threads);
             })
        .def("replay", &Tape::replay, py::call_guard<py::gil_scoped_release>());
    m.def("names", [] {
        std::vector<std::string> found;
        for (const auto& [name, kernel] : *chosen) found.push_back(name);
        return found;
    });
    m.def("instruction_sets", [] {
        std::vector<std::string> found;
        for (const auto& [name, kernels] : usable()) found.push_back(name);
        return found;
    });
    m.def("use", [](const std::string& wanted) {
        for (const auto& [name, kernels] : usable())
            if (name == wanted) {
                chosen = &kernels;
                return;
            }
        throw std::invalid_argument("this CPU has no " + wanted);
    });
}
