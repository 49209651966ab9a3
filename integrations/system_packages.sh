#!/usr/bin/env bash
# system_packages.sh COMMAND...: see that these commands exist; as root on Debian, install the packages of that name.
set -u
missing=()
for command in "$@"; do
    command -v "$command" >/dev/null || missing+=("$command")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "make test-backends needs ${missing[*]}: as root, apt-get install ${missing[*]}" >&2
    exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null && exit 0
echo "apt-get could not install ${missing[*]}" >&2
exit 1
