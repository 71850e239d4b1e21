# Makes the target `torch` available: the libtorch that libpatchconv was, or is going to be, built for.
#
# A CPU build of torch is one find_package(Torch). The package file of a CUDA build insists on a CUDA toolkit with nvcc,
# even for programs that compile no CUDA code, and is easily misled about where it is: `nvcc` on PATH can be a script
# outside the toolkit. So the toolkit is searched for here, the way setup.py does it, and passed to the package. If
# there is none, or none is wanted, the target is made from the libraries themselves. A CPU-only build, or a program
# that uses libpatchconv, needs no more of torch.
#
# In:  CMAKE_PREFIX_PATH or Torch_DIR, or a `python3` that can import torch
#      PATCHCONV_CUDA (auto, 0 or 1), CUDA_HOME and TORCH_CUDA_ARCH_LIST, the last two from the environment as well
# Out: target torch, PATCHCONV_TORCH_ROOT, PATCHCONV_WITH_CUDA; PATCHCONV_NVIDIA_INCLUDES and _LIBRARIES, folders of
#      the packages that come with torch, whose headers fill the gaps of a partial toolkit

set(PATCHCONV_WITH_CUDA OFF)
if(NOT PATCHCONV_CUDA MATCHES "^(auto|0|1)$")
  message(FATAL_ERROR "patchconv: expected PATCHCONV_CUDA to be auto, 0 or 1, got '${PATCHCONV_CUDA}'")
endif()

# Where torch is.
find_path(PATCHCONV_TORCH_CMAKE TorchConfig.cmake HINTS "${Torch_DIR}" PATH_SUFFIXES Torch share/cmake/Torch)
if(NOT PATCHCONV_TORCH_CMAKE)
  find_program(PATCHCONV_PYTHON NAMES python3 python)
  execute_process(
    COMMAND ${PATCHCONV_PYTHON} -c "import torch; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE patchconv_prefix ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  find_path(PATCHCONV_TORCH_CMAKE TorchConfig.cmake HINTS "${patchconv_prefix}/Torch")
endif()
if(NOT PATCHCONV_TORCH_CMAKE)
  message(FATAL_ERROR "patchconv: torch was not found. Pass "
    "-DCMAKE_PREFIX_PATH=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)')")
endif()
get_filename_component(PATCHCONV_TORCH_ROOT "${PATCHCONV_TORCH_CMAKE}/../../.." ABSOLUTE)
get_filename_component(patchconv_nvidia "${PATCHCONV_TORCH_ROOT}/../nvidia" ABSOLUTE)
file(GLOB PATCHCONV_NVIDIA_INCLUDES "${patchconv_nvidia}/*/include")
file(GLOB PATCHCONV_NVIDIA_LIBRARIES "${patchconv_nvidia}/cu[0-9]*/lib")

# Whether the CUDA part is built: torch is a CUDA build, and there is a toolkit of the same major version.
set(patchconv_reason "PATCHCONV_CUDA=0")
if(NOT PATCHCONV_CUDA STREQUAL "0")
  set(patchconv_reason "torch at ${PATCHCONV_TORCH_ROOT} is not a CUDA build")
  if(EXISTS "${PATCHCONV_TORCH_ROOT}/lib/libtorch_cuda.so")
    # Its CUDA major is in the name of the runtime that torch's smallest CUDA library asks for.
    file(STRINGS "${PATCHCONV_TORCH_ROOT}/lib/libc10_cuda.so" patchconv_needed REGEX "libcudart\\.so\\.[0-9]+")
    string(REGEX REPLACE ".*libcudart\\.so\\.([0-9]+).*" "\\1" patchconv_major "${patchconv_needed}")
    set(patchconv_reason "no usable CUDA ${patchconv_major} toolkit")
    find_program(PATCHCONV_NVCC nvcc)
    get_filename_component(patchconv_nvcc_folder "${PATCHCONV_NVCC}" REALPATH)
    get_filename_component(patchconv_nvcc_folder "${patchconv_nvcc_folder}/../.." ABSOLUTE)
    # A toolkit put together from pip's packages serves setup.py but not CMake, whose first act is to link a program with
    # nvcc: it comes without lib64/libcudart.so.
    foreach(home IN ITEMS "${CUDA_HOME}" "$ENV{CUDA_HOME}" "${patchconv_nvcc_folder}" /usr/local/cuda)
      if(home AND EXISTS "${home}/include/cuda_runtime.h" AND EXISTS "${home}/bin/nvcc" AND
         EXISTS "${home}/lib64/libcudart.so")
        file(STRINGS "${home}/include/cuda_runtime_api.h" patchconv_version REGEX "#define CUDART_VERSION")
        if(patchconv_version MATCHES "CUDART_VERSION +${patchconv_major}0[0-9][0-9]")
          get_filename_component(patchconv_toolkit "${home}" REALPATH)
          set(PATCHCONV_WITH_CUDA ON)
          set(patchconv_reason "toolkit at ${patchconv_toolkit}")
          break()
        endif()
      endif()
    endforeach()
  endif()
  if(PATCHCONV_CUDA STREQUAL "1" AND NOT PATCHCONV_WITH_CUDA)
    message(FATAL_ERROR "patchconv: PATCHCONV_CUDA=1, but ${patchconv_reason}. Install the CUDA toolkit that matches "
      "torch and pass -DCUDA_HOME=FOLDER, or a CUDA build of torch")
  endif()
endif()
message(STATUS "patchconv: CUDA ${PATCHCONV_WITH_CUDA} (${patchconv_reason})")

if(TARGET torch)
  # The program that uses this package has found torch already.
elseif(PATCHCONV_WITH_CUDA)
  set(CUDA_TOOLKIT_ROOT_DIR "${patchconv_toolkit}" CACHE PATH "the CUDA toolkit" FORCE)
  set(CMAKE_CUDA_COMPILER "${patchconv_toolkit}/bin/nvcc" CACHE FILEPATH "the CUDA compiler" FORCE)
  if(NOT TORCH_CUDA_ARCH_LIST AND NOT DEFINED ENV{TORCH_CUDA_ARCH_LIST})
    set(TORCH_CUDA_ARCH_LIST "8.0+PTX;9.0a;12.0+PTX")
  endif()
  find_package(Torch REQUIRED PATHS "${PATCHCONV_TORCH_CMAKE}" NO_DEFAULT_PATH)
elseif(EXISTS "${PATCHCONV_TORCH_ROOT}/lib/libtorch_cuda.so")
  foreach(library IN ITEMS c10 torch_cpu torch)
    if(NOT TARGET ${library})
      add_library(${library} SHARED IMPORTED)
      set_target_properties(${library} PROPERTIES
        IMPORTED_LOCATION "${PATCHCONV_TORCH_ROOT}/lib/lib${library}.so"
        INTERFACE_INCLUDE_DIRECTORIES
          "${PATCHCONV_TORCH_ROOT}/include;${PATCHCONV_TORCH_ROOT}/include/torch/csrc/api/include")
    endif()
  endforeach()
  set_property(TARGET torch PROPERTY INTERFACE_LINK_LIBRARIES "torch_cpu;c10")
else()
  find_package(Torch REQUIRED PATHS "${PATCHCONV_TORCH_CMAKE}" NO_DEFAULT_PATH)
endif()
