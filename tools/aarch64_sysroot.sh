#!/bin/sh
# aarch64 libraries for a cross build, without touching the system's packages: Debian's arm64
# packages are downloaded with lists and a cache of their own and unpacked into one directory.
#   sh tools/aarch64_sysroot.sh DIRECTORY
set -eu
[ $# = 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
[ -e "$root/ready" ] && exit 0
packages="libc6 libgcc-s1 libgomp1 libgfortran5 libcmocka0 libcmocka-dev libcjson1 libcjson-dev
    libopenblas0-pthread libopenblas-pthread-dev"
mkdir -p "$root/apt/lists/partial" "$root/apt/cache/archives/partial"
: >"$root/apt/status"
own() {
    apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$root/apt" \
        -o Dir::State::status="$root/apt/status" -o Dir::Cache="$root/apt/cache" \
        -o APT::Sandbox::User= "$@"
}
own update
cd "$root/apt/cache"
own download $packages
for package in *.deb; do dpkg-deb -x "$package" "$root"; done
# What the package's alternatives would have linked.
openblas=$root/usr/lib/aarch64-linux-gnu/openblas-pthread
ln -sf openblas-pthread/libopenblas.so.0 "$root/usr/lib/aarch64-linux-gnu/libopenblas.so.0"
ln -sf ../openblas-pthread/pkgconfig/openblas.pc "$root/usr/lib/aarch64-linux-gnu/pkgconfig/openblas.pc"
rm -rf "$root/apt"
touch "$root/ready"
