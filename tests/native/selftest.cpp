// The kernels without Python: runs the problems of files written by cases.py, and compares with what these expect.
//
// For processors on which torch is hard to come by; built with the baseline's instruction set (build.py):
//
//     make arm              # for AArch64, and runs them in an emulator
//     ./selftest FILE...
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "kernels.h"

using namespace sparsifiner;

namespace {

[[noreturn]] void fail(const std::string& why) {
    std::fprintf(stderr, "selftest: %s\n", why.c_str());
    std::exit(2);
}

// Numbers as a file has them: floats or 32-bit integers, of any shape.
struct Array {
    std::vector<int64_t> shape;
    std::vector<float> floats;
    std::vector<int32_t> ints;
};

// A file: for each array a line "name kind dimensions sizes...", then the numbers, little-endian.
struct Case {
    std::string path;
    std::map<std::string, Array> arrays;

    explicit Case(const char* from) : path(from) {
        std::ifstream file(from, std::ios::binary);
        std::string name;
        char kind;
        int dimensions;
        while (file >> name >> kind >> dimensions) {
            Array array;
            int64_t count = 1;
            for (int i = 0; i < dimensions; ++i) {
                int64_t side;
                file >> side;
                array.shape.push_back(side);
                count *= side;
            }
            file.get();  // the end of the line
            array.floats.resize(kind == 'f' ? count : 0);
            array.ints.resize(kind == 'i' ? count : 0);
            file.read(kind == 'f' ? (char*)array.floats.data() : (char*)array.ints.data(), 4 * count);
            arrays[name] = array;
        }
        if (arrays.empty()) fail("nothing to read in " + path);
    }

    const Array& get(const std::string& name) const {
        const auto found = arrays.find(name);
        if (found == arrays.end()) fail(path + " has no " + name);
        return found->second;
    }
    bool has(const std::string& name) const { return arrays.count(name) > 0; }
    const float* floats(const std::string& name) const { return get(name).floats.data(); }
    const int32_t* ints(const std::string& name) const { return get(name).ints.data(); }
    float number(const std::string& name) const { return get(name).floats.at(0); }
    int32_t integer(const std::string& name) const { return get(name).ints.at(0); }
};

int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Rows of a tensor [batch, heads, tokens, dim] in the type that a case asks for; NaN until something is written.
struct Rows {
    std::vector<float> wide;
    std::vector<uint16_t> narrow;
    std::vector<int64_t> shape;
    bool bf16;

    Rows(std::vector<int64_t> sizes, bool half) : shape(sizes), bf16(half) {
        const size_t count = sizes[0] * sizes[1] * sizes[2] * sizes[3];
        if (bf16) narrow.assign(count, 0x7FC0);
        else wide.assign(count, NAN);
    }
    Rows(const Array& from, bool half) : Rows(from.shape, half) {
        if (!bf16) wide = from.floats;
        for (size_t i = 0; i < narrow.size(); ++i) {  // the file's numbers are bfloat16 already: nothing is rounded
            uint32_t bits;
            std::memcpy(&bits, &from.floats[i], 4);
            narrow[i] = bits >> 16;
        }
    }
    Tokens tokens() {
        Tokens t;
        t.data = bf16 ? (void*)narrow.data() : (void*)wide.data();
        t.batch = shape[1] * shape[2] * shape[3];
        t.head = shape[2] * shape[3];
        t.token = shape[3];
        t.bf16 = bf16;
        return t;
    }
    std::vector<float> floats() const {
        std::vector<float> out = wide;
        for (const uint16_t half : narrow) {
            const uint32_t bits = (uint32_t)half << 16;
            float x;
            std::memcpy(&x, &bits, 4);
            out.push_back(x);
        }
        return out;
    }
};

// Predictor weights packed for the lanes of these kernels, as ops/cpu/packing.py packs them.
struct Packed {
    std::vector<float> up, basis, row_sums, down, value;
    std::vector<uint64_t> occupied;
    std::vector<int32_t> start, landmark;
    Weights weights{};

    Packed(const Case& c, int lanes) {
        const Array& w = c.get("w_up");
        const int64_t heads = w.shape[0], m = w.shape[1], n = w.shape[2];
        const int64_t padded = rounded_up(m, lanes), width = rounded_up(n, 2 * lanes), strip = 8 * lanes;
        const int64_t strips = (width + strip - 1) / strip;
        const float threshold = c.number("basis_threshold");
        const float* source = c.has("w_down") ? c.floats("w_down") : nullptr;
        const bool sparse = c.has("sparse_down");
        up.assign(heads * n * padded, 0);
        down.assign(up.size(), 0);
        row_sums.assign(heads * padded, 0);
        basis.assign(heads * m * width, 0);
        occupied.assign(heads * strips * 2, 0);
        start.push_back(0);
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t t = 0; t < n; ++t) {
                for (int64_t l = 0; l < m; ++l) {
                    const int64_t from = (h * m + l) * n + t, to = (h * n + t) * padded + l;
                    const float x = w.floats[from];
                    up[to] = x;
                    row_sums[h * padded + l] += x;
                    if (x > threshold) {
                        basis[(h * m + l) * width + t] = x;
                        occupied[(h * strips + t / strip) * 2 + l / 64] |= uint64_t{1} << l % 64;
                    }
                    if (source == nullptr) continue;
                    down[to] = source[from];
                    if (source[from] == 0) continue;
                    landmark.push_back((int32_t)l);
                    value.push_back(source[from]);
                }
                start.push_back((int32_t)value.size());
            }
        weights.positions = n;
        weights.padded_landmarks = padded;
        weights.width = width;
        weights.up = up.data();
        weights.basis = basis.data();
        weights.occupied = occupied.data();
        weights.row_sums = row_sums.data();
        weights.down = sparse ? nullptr : down.data();
        weights.down_start = start.data();
        weights.down_landmark = landmark.data();
        weights.down_value = value.data();
    }
};

// What a call gave: by name, the numbers it wrote.
struct Outcome {
    std::map<std::string, std::vector<float>> floats;
    std::map<std::string, std::vector<int32_t>> ints;
    Status status = kDone;
};

Shape shape_of(const Case& c) {
    const int32_t* s = c.ints("sizes");  // batch, heads, tokens, head_dim, landmarks, prefix
    return {s[0], s[1], s[2], s[3], s[4], s[5]};
}

Groups groups_of(const Case& c) {
    const Array& members = c.get("members");
    return {members.ints.data(), members.shape[0], members.shape[1]};
}

Outcome run_fused(const Kernels& kernels, const Case& c, int threads) {
    const bool half = c.has("bf16");
    Rows q(c.get("q"), half), k(c.get("k"), half), v(c.get("v"), half), out(c.get("q").shape, half);
    const Packed packed(c, kernels.lanes);
    Fused call{};
    call.shape = shape_of(c);
    call.q = q.tokens(), call.k = k.tokens(), call.v = v.tokens(), call.out = out.tokens();
    call.weights = packed.weights;
    call.groups = groups_of(c);
    call.budget = c.integer("budget");
    call.tau = c.number("tau");
    call.scale = c.number("scale");
    call.residual = c.integer("residual");
    call.narrow = c.has("narrow");
    call.threads = threads;
    Outcome found;
    found.status = kernels.fused(call);
    found.floats["out"] = out.floats();
    return found;
}

// In one call, or with `lists` the lists alone.
Outcome run_cells(const Kernels& kernels, const Case& c, int threads, bool lists) {
    const bool half = c.has("bf16");
    Rows q(c.get("q"), half), k(c.get("k"), half), v(c.get("v"), half), out(c.get("q").shape, half);
    OpenCells call{};
    call.shape = shape_of(c);
    call.q = q.tokens(), call.k = k.tokens(), call.v = v.tokens(), call.out = out.tokens();
    call.cells.of = c.ints("of");
    call.cells.parent = c.ints("parent");
    call.cells.starts = c.ints("starts");
    call.cells.opened = c.ints("opened");
    call.cells.levels = c.get("opened").shape[0];
    call.cells.count = c.get("parent").shape[0];
    call.cells.closed = c.integer("closed");
    call.groups = groups_of(c);
    call.known = call.shape.tokens;
    call.scale = c.number("scale");
    call.tolerance = c.number("tolerance");
    call.threads = threads;
    const Array& expected = c.get("lists");
    std::vector<int32_t> written(expected.ints.size(), -7), counts(c.get("counts").ints.size(), -7);
    if (lists) {
        call.lists = written.data();
        call.counts = counts.data();
        call.list_width = expected.shape[3];
    }
    Outcome found;
    found.status = kernels.open_cells(call);
    if (lists) found.ints = {{"lists", written}, {"counts", counts}};
    else found.floats["out"] = out.floats();
    return found;
}

Outcome run_select(const Kernels& kernels, const Case& c, int threads) {
    const Packed packed(c, kernels.lanes);
    const Array& expected = c.get("lists");
    std::vector<int32_t> lists(expected.ints.size(), -7), counts(c.get("counts").ints.size(), -7);
    Select call{};
    call.shape = shape_of(c);
    call.coefficients = c.floats("coefficients");
    call.weights = packed.weights;
    call.groups = groups_of(c);
    call.budget = c.integer("budget");
    call.list_width = expected.shape[3];
    call.tau = c.number("tau");
    call.lists = lists.data();
    call.counts = counts.data();
    call.threads = threads;
    Outcome found;
    found.status = kernels.select(call);
    found.ints = {{"lists", lists}, {"counts", counts}};
    return found;
}

// Attention over given lists, and its gradients.
Outcome run_attend(const Kernels& kernels, const Case& c, int threads) {
    const Shape s = shape_of(c);
    const bool half = c.has("bf16");
    Rows q(c.get("q"), half), k(c.get("k"), half), v(c.get("v"), half);
    const Array& direction = c.get("direction");
    Rows out(direction.shape, half), grad(direction, half);
    const Packed packed(c, kernels.lanes);
    const int64_t padded = packed.weights.padded_landmarks, keys = c.get("k").shape[2], units = s.batch * s.heads;
    std::vector<float> normaliser(units * s.tokens, 0);
    Backward back{};
    Attend& call = back.forward;
    call.shape = s;
    call.q = q.tokens(), call.k = k.tokens(), call.v = v.tokens(), call.out = out.tokens();
    call.coefficients = c.floats("coefficients");
    call.up = packed.weights.up;
    call.row_sums = packed.weights.row_sums;
    call.padded_landmarks = padded;
    call.groups = groups_of(c);
    call.lists = c.ints("lists");
    call.list_width = c.get("lists").shape[3];
    call.adds_self = c.integer("adds_self");
    call.keys = keys;
    call.bias = c.has("bias") ? c.floats("bias") : nullptr;
    call.scale = c.number("scale");
    call.normaliser = normaliser.data();
    call.threads = threads;
    Outcome found;
    found.status = kernels.attend(call);
    found.floats["out"] = out.floats();
    if (found.status != kDone) return found;

    back.grad = grad.tokens();
    back.parts = 1;
    std::vector<float> q_grad(units * s.tokens * s.head_dim, 0), k_grad(units * keys * s.head_dim, NAN), v_grad = k_grad;
    std::vector<float> a_grad(c.get("coefficients").floats.size(), 0), up_grad(units * keys * padded, 0);
    std::vector<float> sums_grad(units * padded, 0);
    back.q_grad = q_grad.data(), back.k_grad = k_grad.data(), back.v_grad = v_grad.data();
    back.coefficients_grad = a_grad.data(), back.up_grad = up_grad.data(), back.row_sums_grad = sums_grad.data();
    found.status = kernels.backward(back);
    std::vector<float> w_grad(s.heads * s.landmarks * keys, 0);
    for (int64_t unit = 0; unit < units; ++unit)
        for (int64_t t = 0; t < keys; ++t)
            for (int64_t l = 0; l < s.landmarks; ++l)
                w_grad[(unit % s.heads * s.landmarks + l) * keys + t] +=
                    up_grad[(unit * keys + t) * padded + l] + sums_grad[unit * padded + l];
    found.floats["q_grad"] = q_grad;
    found.floats["k_grad"] = k_grad;
    found.floats["v_grad"] = v_grad;
    found.floats["coefficients_grad"] = a_grad;
    found.floats["w_up_grad"] = w_grad;
    return found;
}

Outcome run(const Kernels& kernels, const std::string& what, const Case& c, int threads) {
    if (what == "fused") return run_fused(kernels, c, threads);
    if (what == "open_cells") return run_cells(kernels, c, threads, false);
    if (what == "open_lists") return run_cells(kernels, c, threads, true);
    if (what == "select") return run_select(kernels, c, threads);
    if (what == "attend") return run_attend(kernels, c, threads);
    fail("no kernel is called " + what);
}

// What is wrong with an outcome; nothing if it is as the file expects it, to the file's tolerance.
std::string compare(const Case& c, const Outcome& found) {
    if (found.status != kDone) return "status " + std::to_string(found.status);
    for (const auto& [name, numbers] : found.ints)
        if (numbers != c.get(name).ints) return name + " differ";
    for (const auto& [name, numbers] : found.floats) {
        const std::vector<float>& expected = c.get("expected_" + name).floats;
        if (numbers.size() != expected.size()) return name + " has another size";
        const float allowed = c.number("allowed");
        float largest = 1;
        for (const float x : expected) largest = std::fmax(largest, std::fabs(x));
        for (size_t i = 0; i < numbers.size(); ++i)
            if (!(std::fabs(numbers[i] - expected[i]) <= allowed * largest))
                return name + "[" + std::to_string(i) + "] is " + std::to_string(numbers[i]) + ", expected " +
                       std::to_string(expected[i]);
    }
    return "";
}

// Bit for bit.
bool same(const Outcome& one, const Outcome& other) {
    for (const auto& [name, numbers] : one.floats) {
        const std::vector<float>& others = other.floats.at(name);
        if (std::memcmp(numbers.data(), others.data(), 4 * numbers.size()) != 0) return false;
    }
    return one.ints == other.ints;
}

}  // namespace

int main(int count, char** paths) {
    if (count < 2) fail("give files written by cases.py");
    const Kernels& kernels = baseline_kernels();
    poison_scratch(true);
    int wrong = 0, runs = 0;
    for (int i = 1; i < count; ++i) {
        const Case c(paths[i]);
        // The kernel's name is what comes before the first '-' in the file's.
        const std::string file = c.path.substr(c.path.find_last_of('/') + 1), kernel = file.substr(0, file.find('-'));
        std::vector<std::string> whats{kernel};
        if (kernel == "open_cells") whats.push_back("open_lists");
        for (const std::string& what : whats) {
            const Outcome alone = run(kernels, what, c, 1), shared = run(kernels, what, c, 2);
            std::string found = compare(c, alone);
            if (found.empty() && !same(alone, shared)) found = "two threads give another result";
            ++runs;
            wrong += !found.empty();
            if (!found.empty()) std::printf("%s, %s: %s\n", file.c_str(), what.c_str(), found.c_str());
        }
    }
    std::printf("%d of %d runs as expected, %s, %d lanes\n", runs - wrong, runs, kernels.name, kernels.lanes);
    return wrong != 0;
}
