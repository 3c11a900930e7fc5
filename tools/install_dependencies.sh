#!/bin/sh
# Installs what building and testing libmla needs, with the system's package manager; where it may
# not (no root, no sudo without a password), prints the exact line and stops. Says nothing when all is there.
set -eu

missing=""
need() { missing="$missing $1"; }
has_command() { command -v "$1" >/dev/null 2>&1; }
has_package() { has_command pkg-config && pkg-config --exists "$1"; }

has_command cc || has_command gcc || has_command clang || need compiler
has_command cmake || need cmake
has_command make || need make
has_command git || need git
has_command pkg-config || need pkg-config
has_command python3 || need python3
has_package libcjson || need cjson
has_package openblas || need openblas
has_package cmocka || need cmocka

[ -n "$missing" ] || exit 0

if has_command apt-get; then
    update="apt-get update" install="apt-get install -y --no-install-recommends"
    name() {
        case $1 in
        compiler) echo "gcc libc6-dev" ;; cjson) echo libcjson-dev ;; openblas) echo libopenblas-dev ;;
        cmocka) echo libcmocka-dev ;; *) echo "$1" ;;
        esac
    }
elif has_command dnf; then
    update=":" install="dnf install -y"
    name() {
        case $1 in
        compiler) echo gcc ;; cjson) echo cjson-devel ;; openblas) echo openblas-devel ;;
        cmocka) echo libcmocka-devel ;; pkg-config) echo pkgconf-pkg-config ;; *) echo "$1" ;;
        esac
    }
elif has_command pacman; then
    update=":" install="pacman -S --noconfirm --needed"
    name() {
        case $1 in
        compiler) echo gcc ;; pkg-config) echo pkgconf ;; python3) echo python ;; *) echo "$1" ;;
        esac
    }
elif has_command apk; then
    update=":" install="apk add"
    name() {
        case $1 in
        compiler) echo "gcc musl-dev" ;; cjson) echo cjson-dev ;; openblas) echo openblas-dev ;;
        cmocka) echo cmocka-dev ;; pkg-config) echo pkgconf ;; *) echo "$1" ;;
        esac
    }
elif has_command brew; then
    update=":" install="brew install"
    name() {
        case $1 in
        compiler) echo llvm ;; *) echo "$1" ;;
        esac
    }
else
    echo "libmla needs:$missing. No package manager that this script knows was found;" \
        "install them and run make again." >&2
    exit 1
fi

packages=""
for item in $missing; do packages="$packages $(name "$item")"; done
line="$install$packages"

if has_command brew && ! has_command apt-get; then
    sudo=""
elif [ "$(id -u)" = 0 ]; then
    sudo=""
elif has_command sudo && sudo -n true 2>/dev/null; then
    sudo="sudo"
else
    echo "libmla needs:$missing. Install with:" >&2
    [ "$update" = ":" ] || echo "    sudo $update" >&2
    echo "    sudo $line" >&2
    exit 1
fi

echo "installing:$packages"
[ "$update" = ":" ] || $sudo $update >/dev/null
if has_command apt-get; then
    DEBIAN_FRONTEND=noninteractive $sudo $line >/dev/null
else
    $sudo $line
fi
