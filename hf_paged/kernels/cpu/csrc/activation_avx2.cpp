#include "vec_avx2.h"

#include "activation_table.h"

const hf_paged::ActivationKernels hf_paged::activation_avx2 = {hf_paged::avx2::apply};
