#!/bin/sh
# make_venv.sh VENV [PYTHON]: checks what the build needs of the machine and makes the virtual environment.
# Each failure says where, what was found, what is needed and what to do, on stderr.
set -eu

venv=$1
python=${2:-}

fail() { # where, found, needed, remedy
  printf '\njcoll setup: %s\n  found:  %s\n  needed: %s\n  do:     %s\n\n' "$1" "$2" "$3" "$4" >&2
  exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
    if is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
}

describe() { command -v "$1" >/dev/null && "$1" --version 2>&1 | head -n 1 || echo "not found"; }

check_python() {
  if [ -z "$python" ]; then
    python=$(find_python)
    [ -n "$python" ] || fail "no suitable Python on PATH" "python3 is: $(describe python3)" \
      "Python 3.11 or later" "install one, or name one: make PYTHON=/path/to/python3.12 ..."
  fi
  is_new_enough "$python" || fail "PYTHON=$python does not do" "$(describe "$python")" \
    "Python 3.11 or later" "install one, or name another: make PYTHON=/path/to/python3.12 ..."
  "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python cannot make virtual environments" \
    "no venv or ensurepip module" "both, from Python's standard library" \
    "install them (on Debian and Ubuntu: apt install python3-venv)"
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
  [ -f "$header" ] || fail "$python has no C headers" "no $header" "Python's development headers" \
    "install them (on Debian and Ubuntu: apt install python3-dev)"
}

check_compiler() {
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  printf '#include <optional>\nint main() { return std::optional<int>(0).value(); }\n' >"$scratch/probe.cc"
  tried=
  # $CXX alone if it is set: CMake would use it and nothing else.
  for compiler in ${CXX:-c++ g++ clang++}; do
    if ! command -v "$compiler" >/dev/null; then
      tried="$tried $compiler (not found)"
    elif "$compiler" -std=c++17 "$scratch/probe.cc" -o "$scratch/probe" >"$scratch/log" 2>&1; then
      return
    else
      tried="$tried $compiler ($(tail -n 1 "$scratch/log"))"
    fi
  done
  fail "no working C++17 compiler" "$tried" "GCC 9, Clang 10 or later" \
    "install one (on Debian and Ubuntu: apt install g++), or name one: CXX=/path/to/g++ make ..."
}

check_python
check_compiler
"$python" -m venv "$venv" || fail "$python -m venv $venv failed" "the message above" \
  "a folder that can be written" "free the folder, or name another: make VENV=/path/to/venv ..."
echo "jcoll setup: $venv uses $(describe "$venv/bin/python")"
