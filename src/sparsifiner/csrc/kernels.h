// What the kernels of every instruction set share with the bindings: plain structs and function tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparsifiner {

constexpr int kMaxLandmarks = 128;
constexpr int kMaxHeadDim = 256;

// [batch, heads, tokens, head_dim] with a contiguous last dimension; strides in elements.
struct Tokens {
    void* data = nullptr;
    int64_t batch = 0, head = 0, token = 0;
    bool bf16 = false;
};

struct Shape {
    int64_t batch, heads, tokens, head_dim, landmarks, prefix;
};

// Predictor weights packed for the kernels' lanes; `positions` is the number of columns they know.
struct Weights {
    int64_t positions;
    int64_t padded_landmarks;  // a multiple of the lanes
    int64_t width;             // score columns: a multiple of two vectors
    const float* up;           // [heads, positions, padded_landmarks]: the dense basis, transposed
    const float* basis;        // [heads, landmarks, width]: zero at or below the threshold
    const uint64_t* occupied;  // [heads, strips, 2]: landmarks with a non-zero in a strip of columns
    const float* row_sums;     // [heads, padded_landmarks]
    const float* down;         // [heads, positions, padded_landmarks], or null:
    const int32_t* down_start; // then per head and position the entries [start, next start) of
    const int32_t* down_landmark;
    const float* down_value;
};

// Which queries share a list: [groups, size] token positions, -1 padded.
struct Groups {
    const int32_t* members;
    int64_t count, size;
};

struct Fused {
    Shape shape;
    Tokens q, k, v, out;
    Weights weights;
    Groups groups;
    const int32_t* positions;  // [batch, tokens]: the original position of each token, or null
    int64_t budget;
    float tau, scale;
    bool residual, narrow;  // narrow: keys and values are held in 16 bits
    int threads;
};

// Cells of a grid at several levels, numbered through, finest level first.
struct Cells {
    const int32_t* of;      // [images, tokens - prefix]: the finest cell of each patch
    int64_t of_image;       // 0 where all images have the same
    const int32_t* parent;  // [count]: the coarser cell that holds each; -1 at the coarsest level
    const int32_t* starts;  // [levels + 1]: where each level's cells begin
    const int32_t* opened;  // [levels]: how many cells are opened at each
    int64_t levels, count;
    bool closed;  // cells that are not opened stand for their keys
};

// Attention at several resolutions: `out` for inference, or `lists` of keys and cells for training.
struct OpenCells {
    Shape shape;  // landmarks 0
    Tokens q, k, v, out;
    Cells cells;
    Groups groups;
    const int32_t* positions;  // [batch, tokens]: the original position of each token, or null
    int64_t known;             // how many positions there are
    float scale;
    float tolerance;  // only cells whose estimated error is larger are opened; 0 for all that `opened` allows
    int32_t* lists;   // [batch, heads, groups, list_width], or null
    int32_t* counts;  // [batch, heads, groups]
    int64_t list_width;
    int threads;
};

struct Select {
    Shape shape;
    const float* coefficients;  // [batch, heads, tokens - prefix, landmarks]
    Weights weights;
    Groups groups;
    int64_t budget, list_width;
    float tau;
    int32_t* lists;   // [batch, heads, groups, list_width]
    int32_t* counts;  // [batch, heads, groups]
    int threads;
};

// Attention over given lists; `landmarks` 0 means no residual.
struct Attend {
    Shape shape;
    Tokens q, k, v, out;        // out without the prefix rows
    const float* coefficients;  // [batch, heads, tokens - prefix, landmarks]
    const float* up;            // [heads, tokens, padded_landmarks]
    const float* row_sums;      // [heads, padded_landmarks]
    int64_t padded_landmarks;
    Groups groups;
    const int32_t* lists;
    int64_t list_width;
    bool adds_self;
    int64_t keys;         // rows of k and v: the tokens, and whatever else lists name
    const float* bias;    // [batch, heads, keys], added to the logits; or null
    float scale;
    float* normaliser;  // [batch, heads, tokens]: log of the softmax's denominator, kept for the backward
    int threads;
};

// Gradients are summed in `parts` slices of the queries, apart from each other: [batch, heads, parts, ...], so that heads
// fewer than threads are shared without a race and the sums have a fixed order.
struct Backward {
    Attend forward;
    Tokens grad;  // of out
    int64_t parts;
    float* q_grad;             // [batch, heads, tokens, head_dim]; queries belong to one part each
    float* k_grad;             // [batch, heads, parts, keys, head_dim]
    float* v_grad;             // the same
    float* coefficients_grad;  // as coefficients
    float* up_grad;            // [batch, heads, parts, tokens, padded_landmarks]
    float* row_sums_grad;      // [batch, heads, parts, padded_landmarks]
};

// 0, or what went wrong.
enum Status { kDone = 0, kNoMemory = 1, kBadList = 2, kBadCells = 3 };

struct Kernels {
    const char* name;
    int lanes;
    Status (*fused)(const Fused&);
    Status (*open_cells)(const OpenCells&);
    Status (*select)(const Select&);
    Status (*attend)(const Attend&);
    Status (*backward)(const Backward&);
};

const Kernels& baseline_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512bf16_kernels();

constexpr int kSlots = 48;

// Memory of the calling thread that is kept from call to call: `slot`, below kSlots, names it, 64-byte aligned. Throws bad_alloc.
void* scratch(int slot, size_t bytes);
void release_scratch();      // gives back what is large
void poison_scratch(bool);   // tests: fill with NaN whatever is handed out

}  // namespace sparsifiner
