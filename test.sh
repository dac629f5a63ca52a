#!/usr/bin/env bash
# Runs every test. What the tests need beside Rust is installed first where it is missing (with
# apt-get, as root or through sudo), or else named.
#
#   ./test.sh                   all that takes no minutes
#   ./test.sh --faults          and torture while servers are killed, stopped and failed over: what CI runs
#   ./test.sh --long            and all in full size: crowds of thousands, a minute of torture of each
#                               store, all versions that are broken on purpose
#   ./test.sh --install         only installs
#   ./test.sh --no-run          only installs and builds
#   ./test.sh -p leasehold      any arguments of `cargo test`
#
# The servers are the newest that are tested; those of this machine with
#   LEASEHOLD_SERVERS=oldest ./test.sh
set -euo pipefail
cd "$(dirname "$0")"

faults=''
case ${1-} in
--long)
    export LEASEHOLD_TESTS=long
    faults=--include-ignored
    shift
    ;;
--faults)
    faults=--include-ignored
    shift
    ;;
esac

# The tools, each with the Debian package that has it: a linker, the shells that the command's
# tests write scripts for, a terminal for those that need one, a browser for pages, and the servers of
# the stores, which tests start privately (crates/testbed).
tools='cc:gcc cc:libc6-dev bash:bash dash:dash flock:util-linux setsid:util-linux script:bsdutils
    setpriv:util-linux unshare:util-linux ip:iproute2 nft:nftables openssl:openssl initdb:postgresql psql:postgresql-client
    mariadbd:mariadb-server mariadb:mariadb-client pgbouncer:pgbouncer
    redis-server:redis-server memcached:memcached python3:python3 python3:python3-venv
    etcd:etcd-server etcdctl:etcd-client node:nodejs java:default-jre-headless javac:default-jdk-headless
    mmdebstrap:mmdebstrap patchelf:patchelf chromium:chromium'

if ! command -v cargo >/dev/null; then
    echo 'test.sh: no cargo: install Rust 1.95 or later first (rustup.rs)' >&2
    exit 1
fi

# Where Debian has servers, off an ordinary user's PATH.
folders=/usr/sbin
for folder in /usr/lib/postgresql/*/bin; do
    folders="$folders:$folder"
done

packages=''
# Libraries, not programs: the server and another client of its locks.
[ -e /usr/share/java/zookeeper.jar ] || packages="$packages zookeeper"
[ -e /usr/share/java/curator-recipes.jar ] || packages="$packages libcurator-recipes-java"
for tool in $tools; do
    (PATH="$PATH:$folders" && command -v "${tool%%:*}") >/dev/null ||
        packages="$packages ${tool#*:}"
done
if [ -n "$packages" ]; then
    if [ "$(id -u)" = 0 ]; then
        as_root=env
    elif sudo -n true 2>/dev/null; then
        as_root='sudo env'
    else
        as_root=''
    fi
    if [ -z "$as_root" ] || ! command -v apt-get >/dev/null; then
        echo "test.sh: missing tools; install these packages, or what they are called here:$packages" >&2
        exit 1
    fi
    echo "test.sh: installing$packages"
    $as_root apt-get -qq update
    # Installing a server would start it, on its standard port: not what whoever runs tests wants.
    # A machine that has a policy of its own for that knows better.
    policy=/usr/sbin/policy-rc.d
    ours=''
    if [ ! -e "$policy" ]; then
        ours=$policy
        trap '$as_root rm -f "$ours"' EXIT
        trap 'exit 1' HUP INT TERM
        printf '#!/bin/sh\nexit 101\n' | $as_root tee "$ours" >/dev/null
        $as_root chmod 755 "$ours"
    fi
    # Unquoted: one word for each package.
    $as_root DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages
    if [ -n "$ours" ]; then
        $as_root rm -f "$ours"
        trap - EXIT HUP INT TERM
    fi
fi

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

# Python clients that contend with ours, and servers that come as packages of Python: in an environment of its own, made once.
environment=$target/python
wanted=crates/testbed/requirements.txt
if ! cmp -s "$wanted" "$environment/installed"; then
    echo "test.sh: installing $(tr '\n' ' ' <"$wanted")"
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check -r "$wanted"
    cp "$wanted" "$environment/installed"
fi

# The emulator of Azure Blob Storage that its makers keep, for that environment's Node.
emulator=azurite@3.37.0
node=$target/node
if [ "$(cat "$node/installed" 2>/dev/null)" != "$emulator" ]; then
    echo "test.sh: installing $emulator"
    rm -rf "$node"
    mkdir -p "$node"
    PATH="$environment/bin:$PATH" npm install --prefix "$node" --silent --no-audit --no-fund "$emulator"
    echo "$emulator" >"$node/installed"
fi

# The newest versions of the servers, beside the ones that are installed.
crates/testbed/newer-servers.sh >/dev/null

if [ "$*" = --install ]; then
    exit
fi

if [ $# -gt 0 ] && [[ " $* " != ' --locked ' ]]; then
    exec cargo test --workspace --all-features "$@"
fi

# How long each test took is something that only a test program knows, and tells those who say that
# they know that its option may change.
runner="target.'cfg(all())'.runner = ['env', 'RUSTC_BOOTSTRAP=1']"
tell=(-Z unstable-options --report-time)
# All is built before anything runs.
cargo test --workspace --all-features "$@" --lib --bins --tests --config "$runner" --no-run
locked=()
[[ " $* " != *' --locked '* ]] || locked=(--locked)
# Examples are programs that a test runs; they have no tests in them.
cargo build --workspace --all-features "${locked[@]}" --examples

# What waits and what computes, side by side.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# run WHICH THREADS ARGUMENTS…: tells of each test as it ends, and keeps the whole.
run() {
    local which=$1 threads=$2 began=$SECONDS
    shift 2
    {
        RUST_TEST_THREADS=$threads cargo test --workspace --all-features --no-fail-fast "$@" 2>&1 ||
            touch "$logs/$which.failed"
    } | tee -a "$logs/$which" |
        grep --line-buffered -E '^(test |     Running|   Doc-tests|error)' || true
    echo "$((SECONDS - began)) s  $which" >>"$logs/lanes"
}

# The programs that compute. The others wait: for leases to end, for servers to start.
computing=(cell_model controls features layers model queue_properties redlock_model simulation)
command=() others=()
for file in crates/*/tests/*.rs crates/*/tests/*/main.rs examples/*/tests/*.rs; do
    name=$(basename "${file%/main.rs}" .rs)
    case $file in
    */stores/main.rs | */torture/main.rs | examples/*/conformance.rs) ;;
    crates/leasehold-cli/*) command+=("--test=$name") ;;
    *) [[ " ${computing[*]} " = *" $name "* ]] || others+=("--test=$name") ;;
    esac
done

# With what is left of the processors, to the end.
(
    renice -n 19 -p "$BASHPID" >/dev/null
    run computing 4 "$@" "${computing[@]/#/--test=}" --config "$runner" -- "${tell[@]}"
    run computing 4 "$@" --doc
) &
computes=$!
# These compute as well, and some ask servers beside it: so first, and alone.
run units 4 "$@" --lib --bins --config "$runner" -- "${tell[@]}"
# In an order by chance, so that what burdens one server does not come all at once.
run waiting 10 "$@" --test stores --config "$runner" -- "${tell[@]}" --shuffle &
waits=$!
# The command's crowds of forty processes come one at a time.
run command 3 "$@" "${command[@]}" --config "$runner" -- "${tell[@]}" &
commands=$!
# Most of these wait for one thing at a time.
run others 6 "$@" "${others[@]}" --config "$runner" -- "${tell[@]}"
wait "$waits" "$commands"
# One of these starts a process for each request.
run examples 6 "$@" --test conformance --config "$runner" -- "${tell[@]}"
# With leases of half a second: a disk that is busy with something else is a fault that nobody made.
run torture 8 "$@" --test torture --config "$runner" -- "${tell[@]}" $faults
wait "$computes"

printf '\nHow long what took that runs side by side:\n'
cat "$logs/lanes"
printf '\nThe ten slowest tests:\n'
cat "$logs"/* | sed -nE 's/^test (.*) \.\.\. ok <([0-9.]+)s>$/\2 s  \1/p' | sort -rn | sed -n 1,10p
status=0
for failed in "$logs"/*.failed; do
    [ -e "$failed" ] || continue
    status=101
    printf '\nFAILED, among those that are %s:\n' "$(basename "$failed" .failed)"
    sed -nE '/^(failures:|error)/,/^test result/p' "${failed%.failed}"
done
exit $status
