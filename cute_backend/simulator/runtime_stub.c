/* The part of libcute_dsl_runtime.so that the JIT-compiled host code of a CuTe DSL function calls, with a
 * host process in the place of the GPU: device pointers are host pointers, streams run at once, and a kernel
 * launch is handed to the simulator (host.py) through `struct device`.
 *
 * The file is compiled with hidden visibility and linked into one shared library with the host code's object,
 * so that the real runtime, which the DSL loads into the same process for every compilation, is never called.
 * A runtime function that is missing here is therefore named by the linker, and host.py repeats the name.
 *
 * Signatures are those of the CUDA runtime and driver API functions of the same name (less the underscore).
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, LAUNCH_FAILURE = 719 }; /* cudaError_t */
enum { MAX_DYNAMIC_SHARED_SIZE = 8, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14 };     /* cudaFuncAttribute */
enum { SHARED_SIZE_BYTES = 1 };                                                    /* CUfunction_attribute */
enum { MEMORY_ALIGNMENT = 256, UNINITIALISED = 0xFF };                             /* as cudaMalloc; a NaN */

struct kernel {
    const char *name;
    int32_t max_dynamic_shared;
    int32_t non_portable_cluster;
};

/* The functions that host.py implements. Each returns a cudaError_t. */
struct device {
    int (*attribute)(int32_t *value, int32_t attribute);
    int (*static_shared)(int32_t *bytes, const char *kernel);
    int (*launch)(const void *config, const struct kernel *kernel, void **parameters);
    int (*allocated)(void *address, size_t bytes);
    int (*freed)(void *address);
};

static _Thread_local const struct device *device;

__attribute__((visibility("default"))) void cute_simulator_attach(const struct device *answering)
{
    device = answering;
}

/* Libraries and kernels: the image is not looked at, its PTX is what runs. */

int _cudaLibraryLoadData(const void **library, const void *image)
{
    *library = image;
    return SUCCESS;
}

int _cudaLibraryUnload(void *library)
{
    (void)library;
    return SUCCESS;
}

int _cudaLibraryGetKernel(struct kernel **kernel, void *library, const char *name)
{
    (void)library;
    struct kernel *made = calloc(1, sizeof *made);
    char *kept = strdup(name);
    if (!made || !kept)
        return OUT_OF_MEMORY;
    made->name = kept;
    *kernel = made;
    return SUCCESS;
}

int _cudaFuncSetAttribute(struct kernel *kernel, int attribute, int value)
{
    if (attribute == MAX_DYNAMIC_SHARED_SIZE)
        kernel->max_dynamic_shared = value;
    else if (attribute == NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
        kernel->non_portable_cluster = value;
    else
        return INVALID_VALUE;
    return SUCCESS;
}

int _cudaKernelSetAttributeForDevice(struct kernel *kernel, int attribute, int value, int ordinal)
{
    (void)ordinal;
    return _cudaFuncSetAttribute(kernel, attribute, value);
}

int _cuKernelGetAttribute(int32_t *value, int attribute, struct kernel *kernel, int ordinal)
{
    (void)ordinal;
    return attribute == SHARED_SIZE_BYTES ? device->static_shared(value, kernel->name) : INVALID_VALUE;
}

int _cudaLaunchKernelEx(const void *config, struct kernel *kernel, void **parameters)
{
    return device->launch(config, kernel, parameters);
}

/* The device. */

int _cudaGetDeviceCount(int32_t *count)
{
    *count = 1;
    return SUCCESS;
}

int _cudaGetDevice(int32_t *ordinal)
{
    *ordinal = 0;
    return SUCCESS;
}

int _cudaSetDevice(int ordinal)
{
    return ordinal == 0 ? SUCCESS : INVALID_VALUE;
}

int _cuDeviceGet(int32_t *handle, int ordinal)
{
    *handle = ordinal;
    return ordinal == 0 ? SUCCESS : INVALID_VALUE;
}

int _cudaDeviceGetAttribute(int32_t *value, int attribute, int ordinal)
{
    (void)ordinal;
    return device->attribute(value, attribute);
}

int _cudaDeviceSynchronize(void)
{
    return SUCCESS;
}

int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int32_t *blocks, struct kernel *kernel, int threads,
                                                   size_t shared)
{
    (void)kernel, (void)threads, (void)shared;
    *blocks = 1;
    return SUCCESS;
}

/* Memory. */

int _cudaMalloc(void **address, size_t bytes)
{
    size_t rounded = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
    *address = NULL;
    if (!bytes)
        return SUCCESS;
    *address = aligned_alloc(MEMORY_ALIGNMENT, rounded);
    if (!*address)
        return OUT_OF_MEMORY;
    memset(*address, UNINITIALISED, rounded);
    return device->allocated(*address, bytes);
}

int _cudaMallocAsync(void **address, size_t bytes, void *stream)
{
    (void)stream;
    return _cudaMalloc(address, bytes);
}

int _cudaFree(void *address)
{
    if (!address)
        return SUCCESS;
    int error = device->freed(address);
    if (error == SUCCESS)
        free(address);
    return error;
}

int _cudaFreeAsync(void *address, void *stream)
{
    (void)stream;
    return _cudaFree(address);
}

int _cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
    (void)kind;
    memmove(to, from, bytes);
    return SUCCESS;
}

int _cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream)
{
    (void)stream;
    return _cudaMemcpy(to, from, bytes, kind);
}

int _cudaMemset(void *address, int value, size_t bytes)
{
    memset(address, value, bytes);
    return SUCCESS;
}

int _cudaMemsetAsync(void *address, int value, size_t bytes, void *stream)
{
    (void)stream;
    return _cudaMemset(address, value, bytes);
}

/* Streams and events: everything has happened by the time that the call returns. */

static char a_handle;

int _cudaStreamCreate(void **stream)
{
    *stream = &a_handle;
    return SUCCESS;
}

int _cudaStreamDestroy(void *stream)
{
    (void)stream;
    return SUCCESS;
}

int _cudaStreamSynchronize(void *stream)
{
    (void)stream;
    return SUCCESS;
}

int _cudaStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    (void)stream, (void)event, (void)flags;
    return SUCCESS;
}

int _cudaEventCreate(void **event)
{
    *event = &a_handle;
    return SUCCESS;
}

int _cudaEventDestroy(void *event)
{
    (void)event;
    return SUCCESS;
}

int _cudaEventRecord(void *event, void *stream)
{
    (void)event, (void)stream;
    return SUCCESS;
}

/* The DSL's own helpers around them. */

static const char *error_name(int error)
{
    switch (error) {
    case SUCCESS: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case LAUNCH_FAILURE: return "cudaErrorLaunchFailure";
    default: return "cudaErrorUnknown";
    }
}

const char *cuda_dialect_get_error_name(int error)
{
    return error_name(error);
}

void cuda_dialect_print_on_error(int error)
{
    if (error != SUCCESS)
        fprintf(stderr, "simulated CUDA error: %s\n", error_name(error));
}

int cuda_dialect_init_library_once(void **library, int (*load)(void **), int (*load_to_device)(void **, int),
                                   void (*set_raised)(const char *kind, const char *message))
{
    if (*library)
        return SUCCESS;
    void *loaded = NULL;
    int error = load(&loaded);
    if (error == SUCCESS && load_to_device)
        error = load_to_device(&loaded, 0);
    if (error == SUCCESS)
        *library = loaded;
    else
        set_raised("RuntimeError", error_name(error));
    return error;
}

void cuda_dialect_unload_library_once(void **library)
{
    *library = NULL;
}

void CuteDSLRT_TVMFFISetRaisedCudaError(void (*set_raised)(const char *kind, const char **parts, int count),
                                        int error)
{
    const char *parts[] = {"simulated CUDA error: ", error_name(error)};
    set_raised("RuntimeError", parts, 2);
}
