// What the emulated driver declares of cuda.h. With -DZT_CUDA_H='"/path/cuda.h"' CUDA's own header takes its place, so that the compiler
// holds every declaration and number here against it: g++ -std=c++17 -fsyntax-only -DZT_CUDA_H=... driver.cpp
#pragma once

#include <stddef.h>

#ifdef ZT_CUDA_H
#include ZT_CUDA_H
#define ZT_SAME(name, value) static_assert((int)name == value, #name);
#else
typedef int CUdevice;
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;
typedef int CUresult;
typedef int CUfunction_attribute;
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define ZT_SAME(name, value) static const int name = value;
#endif

ZT_SAME(CUDA_SUCCESS, 0)
ZT_SAME(CUDA_ERROR_INVALID_VALUE, 1)
ZT_SAME(CUDA_ERROR_OUT_OF_MEMORY, 2)
ZT_SAME(CUDA_ERROR_NOT_INITIALIZED, 3)
ZT_SAME(CUDA_ERROR_INVALID_DEVICE, 101)
ZT_SAME(CUDA_ERROR_INVALID_IMAGE, 200)
ZT_SAME(CUDA_ERROR_INVALID_CONTEXT, 201)
ZT_SAME(CUDA_ERROR_NO_BINARY_FOR_GPU, 209)
ZT_SAME(CUDA_ERROR_INVALID_PTX, 218)
ZT_SAME(CUDA_ERROR_INVALID_SOURCE, 300)
ZT_SAME(CUDA_ERROR_INVALID_HANDLE, 400)
ZT_SAME(CUDA_ERROR_NOT_FOUND, 500)
ZT_SAME(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 3)
ZT_SAME(CU_FUNC_ATTRIBUTE_NUM_REGS, 4)
