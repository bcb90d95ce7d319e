/* The part of TensorFlow's C API that is used here, declared anew: a table of functions that are looked up in the library that
 * the process has loaded. Compiling and linking need nothing of TensorFlow. One binary serves all versions that have the
 * functions: 2.16 and later. Names and meanings are TensorFlow's. */
#ifndef ENGINE_BINDINGS_TENSORFLOW_C_H
#define ENGINE_BINDINGS_TENSORFLOW_C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_Shape TF_Shape;                 /* TF_ShapeHandle */
typedef struct TF_Shapes TF_Shapes;               /* TF_ShapeInferenceContext */
typedef struct TF_OpBuilder TF_OpBuilder;         /* TF_OpDefinitionBuilder */
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_Construction TF_Construction;   /* TF_OpKernelConstruction */
typedef struct TF_Context TF_Context;             /* TF_OpKernelContext */
typedef struct TF_Done TF_Done;                   /* TF_AsyncOpKernelDoneCallback */

enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_ALREADY_EXISTS = 6, TF_RESOURCE_EXHAUSTED = 8, TF_FAILED_PRECONDITION = 9,
       TF_ABORTED = 10, TF_INTERNAL = 13 };
enum { TF_FLOAT = 1, TF_DOUBLE, TF_INT32, TF_UINT8, TF_INT16, TF_INT8, TF_COMPLEX64 = 8, TF_INT64, TF_BOOL, TF_BFLOAT16 = 14,
       TF_UINT16 = 17, TF_COMPLEX128, TF_HALF, TF_UINT32 = 22, TF_UINT64, TF_FLOAT8_E5M2, TF_FLOAT8_E4M3FN, TF_FLOAT8_E4M3FNUZ,
       TF_FLOAT8_E5M2FNUZ = 28 };
enum { TF_MOST_DIMS = 254 };

typedef struct TF_Text {                          /* TF_StringView: not terminated */
  const char *data;
  size_t bytes;
} TF_Text;

/* Result, name and parameters of each function. */
#define TENSORFLOW_FUNCTIONS(ROW)                                                                                            \
  ROW(TF_Status *, NewStatus, (void))                                                                                        \
  ROW(void, DeleteStatus, (TF_Status *))                                                                                     \
  ROW(void, SetStatus, (TF_Status *, int code, const char *message))                                                         \
  ROW(int, GetCode, (const TF_Status *))                                                                                     \
  ROW(const char *, Message, (const TF_Status *))                                                                            \
  ROW(TF_Tensor *, NewTensor, (int dtype, const int64_t *dims, int ndim, void *data, size_t bytes,                           \
                               void (*release)(void *data, size_t bytes, void *argument), void *argument))                   \
  ROW(void, DeleteTensor, (TF_Tensor *))                                                                                     \
  ROW(int, TensorType, (const TF_Tensor *))                                                                                  \
  ROW(int, NumDims, (const TF_Tensor *))                                                                                     \
  ROW(int64_t, Dim, (const TF_Tensor *, int d))                                                                              \
  ROW(void *, TensorData, (const TF_Tensor *))                                                                               \
  ROW(size_t, TensorByteSize, (const TF_Tensor *))                                                                           \
  ROW(int64_t, TensorElementCount, (const TF_Tensor *))                                                                      \
  ROW(TF_OpBuilder *, NewOpDefinitionBuilder, (const char *name))                                                            \
  ROW(void, OpDefinitionBuilderAddAttr, (TF_OpBuilder *, const char *spec))                                                  \
  ROW(void, OpDefinitionBuilderAddInput, (TF_OpBuilder *, const char *spec))                                                 \
  ROW(void, OpDefinitionBuilderAddOutput, (TF_OpBuilder *, const char *spec))                                                \
  ROW(void, OpDefinitionBuilderSetIsStateful, (TF_OpBuilder *, bool))                                                        \
  ROW(void, OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpBuilder *, void (*infer)(TF_Shapes *, TF_Status *)))         \
  ROW(void, RegisterOpDefinition, (TF_OpBuilder *, TF_Status *))                                                             \
  ROW(int64_t, ShapeInferenceContextNumInputs, (TF_Shapes *))                                                                \
  ROW(TF_Shape *, NewShapeHandle, (void))                                                                                    \
  ROW(void, DeleteShapeHandle, (TF_Shape *))                                                                                 \
  ROW(TF_Shape *, ShapeInferenceContextScalar, (TF_Shapes *))                                                                \
  ROW(void, ShapeInferenceContextGetInput, (TF_Shapes *, int k, TF_Shape *, TF_Status *))                                    \
  ROW(void, ShapeInferenceContextSetOutput, (TF_Shapes *, int k, TF_Shape *, TF_Status *))                                   \
  ROW(void, ShapeInferenceContextSetUnknownShape, (TF_Shapes *, TF_Status *))                                                \
  ROW(TF_KernelBuilder *, NewKernelBuilder, (const char *op, const char *device, void *(*create)(TF_Construction *),         \
                                             void (*compute)(void *, TF_Context *), void (*destroy)(void *)))                \
  ROW(TF_KernelBuilder *, NewAsyncKernelBuilder, (const char *op, const char *device, void *(*create)(TF_Construction *),    \
                                                  void (*compute)(void *, TF_Context *, TF_Done *), void (*destroy)(void *))) \
  ROW(void, RegisterKernelBuilder, (const char *name, TF_KernelBuilder *, TF_Status *))                                      \
  ROW(void, OpKernelConstruction_GetAttrSize, (TF_Construction *, const char *name, int32_t *list, int32_t *total,           \
                                               TF_Status *))                                                                 \
  ROW(void, OpKernelConstruction_GetAttrInt64, (TF_Construction *, const char *name, int64_t *value, TF_Status *))           \
  ROW(void, OpKernelConstruction_GetAttrBool, (TF_Construction *, const char *name, unsigned char *value, TF_Status *))      \
  ROW(void, OpKernelConstruction_GetAttrString, (TF_Construction *, const char *name, char *value, size_t most,              \
                                                 TF_Status *))                                                               \
  ROW(TF_Text, OpKernelConstruction_GetName, (TF_Construction *))                                                            \
  ROW(void, OpKernelConstruction_Failure, (TF_Construction *, TF_Status *))                                                  \
  ROW(void, OpKernelContext_Failure, (TF_Context *, TF_Status *))                                                            \
  ROW(int, NumInputs, (TF_Context *))                                                                                        \
  ROW(void, GetInput, (TF_Context *, int k, TF_Tensor **, TF_Status *))                                                      \
  ROW(void, SetOutput, (TF_Context *, int k, const TF_Tensor *, TF_Status *))                                                \
  ROW(TF_Tensor *, AllocateOutput, (TF_Context *, int k, int dtype, const int64_t *dims, int ndim, size_t bytes,             \
                                    TF_Status *))                                                                            \
  ROW(TF_Tensor *, ForwardInputOrAllocateOutput, (TF_Context *, const int *inputs, int count, int k, const int64_t *dims,    \
                                                  int ndim, int *forwarded, TF_Status *))                                    \
  ROW(int64_t, StepId, (TF_Context *))                                                                                       \
  ROW(int64_t, GetIterId, (TF_Context *))                                                                                    \
  ROW(void, RunAsyncOpKernelDoneCallback, (TF_Done *))

#define TENSORFLOW_MEMBER(result, name, parameters) result(*name) parameters;
#define TENSORFLOW_SYMBOL(result, name, parameters) "TF_" #name,

typedef struct tensorflow_functions {
  TENSORFLOW_FUNCTIONS(TENSORFLOW_MEMBER)
} tensorflow_functions;

#endif
