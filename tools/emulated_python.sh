#!/bin/sh
# Makes FOLDER/python, a Python for AArch64 that runs under emulation, with packages.
#
#   tools/emulated_python.sh FOLDER PIP ARGUMENT...     the arguments are those of `pip install`
#
# Debian's packages are unpacked into FOLDER, nothing is installed: the lists and the state of the
# system's own packages stay as they are, and nobody needs to be root.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
pip=$2
shift 2

mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$folder/root"
: > "$folder/apt/status"
cat > "$folder/apt.conf" <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$folder/apt";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
END
APT_CONFIG="$folder/apt.conf"
export APT_CONFIG
echo "Fetching Python for AArch64"
apt-get -qq update
apt-get -qq install --no-install-recommends --download-only -y python3 libstdc++6 > /dev/null
for package in "$folder"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$folder/root"; done

# Named by this script, Python starts others like itself under emulation, too.
cat > "$folder/python" <<END
#!/bin/sh
export PYTHONHOME="$folder/root/usr" PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$folder/site:\${PYTHONPATH:-}"
exec qemu-aarch64-static -L "$folder/root" -0 "$folder/python" "$folder/root/usr/bin/python3" "\$@"
END
chmod +x "$folder/python"
version=$("$folder/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$pip" install --quiet --target "$folder/site" --upgrade --only-binary=:all: \
  --platform manylinux_2_31_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
  --platform manylinux2014_aarch64 --implementation cp --python-version "$version" "$@"
