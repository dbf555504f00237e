// Compiled once per instruction set, with SPARSIFINER_ISA naming it.
#include "kernels.h"

#include "backward.hpp"
#include "cells.hpp"
#include "fused.hpp"
#include "lists.hpp"

#define SPARSIFINER_JOIN(a, b) a##b
#define SPARSIFINER_TABLE(isa) SPARSIFINER_JOIN(isa, _kernels)
#define SPARSIFINER_TEXT(isa) #isa
#define SPARSIFINER_NAME(isa) SPARSIFINER_TEXT(isa)

namespace sparsifiner {

const Kernels& SPARSIFINER_TABLE(SPARSIFINER_ISA)() {
    static const Kernels table = {SPARSIFINER_NAME(SPARSIFINER_ISA), SPARSIFINER_ISA::kLanes,
                                  SPARSIFINER_ISA::fused,            SPARSIFINER_ISA::open_cells,
                                  SPARSIFINER_ISA::select,           SPARSIFINER_ISA::attend,
                                  SPARSIFINER_ISA::backward};
    return table;
}

}  // namespace sparsifiner
