// The native module. Tensors come as raw pointers and strides: whoever calls has checked types, devices and bounds
// (ops/cpu does), which costs a fifth of passing arrays.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;
using namespace sparsifiner;

namespace {

std::vector<const Kernels*> supported() {
    std::vector<const Kernels*> found;
#if defined(SPARSIFINER_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512bf16_kernels());
    if (avx512) found.push_back(&avx512_kernels());
    if (avx2) found.push_back(&avx2_kernels());
#endif
    found.push_back(&baseline_kernels());
    return found;
}

const Kernels* chosen = supported().front();

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Tokens tokens(const nb::tuple& x) {
    return {at<void>(nb::cast<uintptr_t>(x[0])), nb::cast<int64_t>(x[1]), nb::cast<int64_t>(x[2]), nb::cast<int64_t>(x[3]),
            nb::cast<bool>(x[4])};
}

Shape shape(const nb::tuple& x) {
    return {nb::cast<int64_t>(x[0]), nb::cast<int64_t>(x[1]), nb::cast<int64_t>(x[2]),
            nb::cast<int64_t>(x[3]), nb::cast<int64_t>(x[4]), nb::cast<int64_t>(x[5])};
}

void check(Status status) {
    if (status == kNoMemory) throw std::bad_alloc();
    if (status == kBadCells) throw std::invalid_argument("cells, their levels and the groups of queries do not belong together");
    if (status == kBadList) throw std::invalid_argument("lists must hold ascending indices of tokens, padded with -1");
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Fused sparse attention on CPUs. Internal: use sparsifiner.ops.";

    nb::class_<Weights>(m, "Weights")
        .def("__init__", [](Weights* self, int64_t positions, int64_t padded, int64_t width, uintptr_t up, uintptr_t basis,
                            uintptr_t occupied, uintptr_t row_sums, uintptr_t down, uintptr_t start, uintptr_t landmark,
                            uintptr_t value) {
            new (self) Weights{positions,           padded,
                               width,               at<float>(up),
                               at<float>(basis),    at<uint64_t>(occupied),
                               at<float>(row_sums), at<float>(down),
                               at<int32_t>(start),  at<int32_t>(landmark),
                               at<float>(value)};
        });
    nb::class_<Groups>(m, "Groups").def("__init__", [](Groups* self, uintptr_t members, int64_t count, int64_t size) {
        new (self) Groups{at<int32_t>(members), count, size};
    });
    nb::class_<Attend>(m, "Attend")
        .def("__init__", [](Attend* self, nb::tuple sizes, nb::tuple q, nb::tuple k, nb::tuple v, nb::tuple out,
                            uintptr_t coefficients, uintptr_t up, uintptr_t row_sums, int64_t padded, const Groups& groups,
                            uintptr_t lists, int64_t list_width, bool adds_self, int64_t keys, uintptr_t bias, float scale,
                            uintptr_t normaliser, int threads) {
            new (self) Attend{shape(sizes), tokens(q), tokens(k), tokens(v), tokens(out), at<float>(coefficients),
                              at<float>(up), at<float>(row_sums), padded, groups, at<int32_t>(lists), list_width, adds_self,
                              keys, at<float>(bias), scale, at<float>(normaliser), threads};
        });

    m.def("fused", [](nb::tuple sizes, nb::tuple q, nb::tuple k, nb::tuple v, nb::tuple out, const Weights& weights,
                      const Groups& groups, uintptr_t positions, int64_t budget, float tau, float scale, bool residual,
                      bool narrow, int threads) {
        const Fused call{shape(sizes), tokens(q), tokens(k), tokens(v), tokens(out), weights, groups,
                         at<int32_t>(positions), budget, tau, scale, residual, narrow, threads};
        Status status;
        {
            nb::gil_scoped_release release;
            status = chosen->fused(call);
        }
        check(status);
    });
    m.def("open_cells", [](nb::tuple sizes, nb::tuple q, nb::tuple k, nb::tuple v, nb::tuple out, uintptr_t of,
                           int64_t of_image, uintptr_t parent, int64_t count, std::vector<int32_t> starts,
                           std::vector<int32_t> opened, bool closed, const Groups& groups, uintptr_t positions, int64_t known,
                           float scale, float tolerance, uintptr_t lists, uintptr_t counts, int64_t list_width, int threads) {
        if (starts.size() != opened.size() + 1) check(kBadCells);
        const Cells cells{at<int32_t>(of), of_image, at<int32_t>(parent), starts.data(), opened.data(),
                          (int64_t)opened.size(), count, closed};
        const OpenCells call{shape(sizes), tokens(q), tokens(k), tokens(v), tokens(out), cells, groups,
                             at<int32_t>(positions), known, scale, tolerance, at<int32_t>(lists), at<int32_t>(counts),
                             list_width, threads};
        Status status;
        {
            nb::gil_scoped_release release;
            status = chosen->open_cells(call);
        }
        check(status);
    });
    m.def("select", [](nb::tuple sizes, uintptr_t coefficients, const Weights& weights, const Groups& groups, int64_t budget,
                       int64_t list_width, float tau, uintptr_t lists, uintptr_t counts, int threads) {
        const Select call{shape(sizes), at<float>(coefficients), weights, groups, budget, list_width, tau,
                          at<int32_t>(lists), at<int32_t>(counts), threads};
        Status status;
        {
            nb::gil_scoped_release release;
            status = chosen->select(call);
        }
        check(status);
    });
    m.def("attend", [](const Attend& call) {
        Status status;
        {
            nb::gil_scoped_release release;
            status = chosen->attend(call);
        }
        check(status);
    });
    m.def("backward", [](const Attend& forward, nb::tuple grad, int64_t parts, uintptr_t q_grad, uintptr_t k_grad,
                         uintptr_t v_grad, uintptr_t coefficients_grad, uintptr_t up_grad, uintptr_t row_sums_grad) {
        const Backward call{forward,           tokens(grad),      parts,
                            at<float>(q_grad), at<float>(k_grad), at<float>(v_grad),
                            at<float>(coefficients_grad), at<float>(up_grad), at<float>(row_sums_grad)};
        Status status;
        {
            nb::gil_scoped_release release;
            status = chosen->backward(call);
        }
        check(status);
    });

    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : supported()) names.emplace_back(kernels->name);
        return names;
    });
    m.def("instruction_set", [] { return std::string(chosen->name); });
    m.def("use", [](const std::string& name) {
        for (const Kernels* kernels : supported()) {
            if (name == kernels->name) {
                chosen = kernels;
                return;
            }
        }
        throw std::invalid_argument("this machine cannot run the instruction set " + name);
    });
    m.def("lanes", [] { return chosen->lanes; });
    m.def("poison_scratch", &poison_scratch);
    m.attr("max_landmarks") = kMaxLandmarks;
    m.attr("max_head_dim") = kMaxHeadDim;
}
