#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels.h"

namespace sparsifiner {
namespace {

constexpr size_t kKeep = size_t{8} << 20;  // larger slots are given back after a call

struct Buffers {
    void* data[kSlots] = {};
    size_t size[kSlots] = {};
    ~Buffers() {
        for (void* p : data) std::free(p);
    }
};

thread_local Buffers buffers;
bool poisoned = false;

}  // namespace

void* scratch(int slot, size_t bytes) {
    if (bytes > buffers.size[slot]) {
        std::free(buffers.data[slot]);
        buffers.size[slot] = 0;
        const size_t rounded = (bytes + 63) / 64 * 64;
        buffers.data[slot] = std::aligned_alloc(64, rounded);
        if (!buffers.data[slot]) throw std::bad_alloc();
        buffers.size[slot] = rounded;
    }
    if (poisoned && bytes) std::memset(buffers.data[slot], 0xFF, buffers.size[slot]);  // NaN, and -1
    return buffers.data[slot];
}

void release_scratch() {
    for (int slot = 0; slot < kSlots; ++slot) {
        if (buffers.size[slot] <= kKeep) continue;
        std::free(buffers.data[slot]);
        buffers.data[slot] = nullptr;
        buffers.size[slot] = 0;
    }
}

void poison_scratch(bool on) { poisoned = on; }

}  // namespace sparsifiner
