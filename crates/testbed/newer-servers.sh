#!/bin/sh
# Makes the newest servers that Debian has available to the tests, beside the ones that are installed:
#
#   sid      MySQL, PostgreSQL 18, Redis 8, Valkey 9, etcd 3.5
#   trixie   MariaDB 11.8, ZooKeeper 3.9
#
# Packages are only extracted, into a folder of their own: no script of theirs runs, nothing is
# started, and the machine's own packages stay as they are. The programs are then told to load the
# libraries beside them, so they run like any other, without chroot and as any user.
#
#   newer-servers.sh         makes what is missing (about a minute and 1 GB) and prints the folder
#   newer-servers.sh where   prints the folder, whether or not it is there
#
# What cannot be had here is said, and left out: the tests then run on the installed servers.
set -eu

# Not in the checkout: PostgreSQL refuses root, and its own user may be unable to enter there. A
# folder of root's, or of this user's: what is run from it must not be anybody else's to change.
if [ "$(id -u)" = 0 ]; then
    folder=/var/cache/leasehold-servers
else
    folder=${XDG_CACHE_HOME:-$HOME/.cache}/leasehold-servers
fi
# Another version of this script makes its servers anew.
made=$(cksum <"$0" | cut -d ' ' -f 1)
folder=$folder/$made

if [ "${1:-}" = where ]; then
    echo "$folder"
    exit
fi

left_out() {
    echo "newer-servers.sh: no newer servers: $1; tests run on the installed ones" >&2
    exit 0
}

# One version of Debian: its name, the packages, the programs to be run.
extract() {
    suite=$1 packages=$2 programs=$3
    root=$folder/$suite
    [ ! -e "$root" ] || return 0
    echo "newer-servers.sh: extracting $packages of Debian $suite" >&2
    part=$(mktemp -d "$folder/.$suite.XXXXXX")
    chmod 755 "$part"
    # A mirror that stands still has lists that are past their date.
    if ! mmdebstrap --quiet --variant=extract --include="$packages" \
        --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Check-Valid-Until "false"' \
        "$suite" "$part" "$mirror" >"$folder/$suite.log" 2>&1; then
        rm -rf "$part"
        left_out "Debian $suite cannot be had ($folder/$suite.log says why)"
    fi
    rm -rf "$part/var" "$part/usr/share/doc" "$part/usr/share/man" "$part/usr/share/locale"
    # It is moved when it is complete: the libraries are looked for where it will be.
    libraries=$root/usr/lib/x86_64-linux-gnu:$root/usr/lib/mysql/private
    for program in $programs; do
        [ -f "$part/$program" ] || left_out "Debian $suite has no $program"
        file=$(readlink -f "$part/$program")
        # What is linked statically, or is a script, runs as it is.
        patchelf --print-interpreter "$file" >/dev/null 2>&1 || continue
        patchelf --set-interpreter "$root/usr/lib64/ld-linux-x86-64.so.2" \
            --force-rpath --set-rpath "$libraries" "$file"
    done
    # Another run may have been faster.
    mv -T "$part" "$root" 2>/dev/null || rm -rf "$part"
}

[ "$(uname -m)" = x86_64 ] || left_out "this is not an x86_64 machine"
for tool in mmdebstrap patchelf; do
    command -v "$tool" >/dev/null || left_out "no $tool here"
done
mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources 2>/dev/null | head -n 1)
if [ -z "$mirror" ] && [ -r /etc/apt/sources.list ]; then
    mirror=$(awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) { print $i; exit } }' \
        /etc/apt/sources.list)
fi
[ -n "$mirror" ] || left_out 'apt has no mirror of Debian here'

mkdir -p "$folder"
[ -O "$folder" ] || left_out "$folder is somebody else's"

postgres=''
for program in postgres initdb psql pg_isready; do
    postgres="$postgres usr/lib/postgresql/18/bin/$program"
done
extract sid mysql-server-core,mysql-client-core,postgresql-18,redis-server,valkey-server,etcd-server,etcd-client \
    "usr/sbin/mysqld usr/bin/mysql usr/bin/redis-server usr/bin/valkey-server usr/bin/etcd usr/bin/etcdctl $postgres"
extract trixie mariadb-server-core,mariadb-client-core,libzookeeper-java \
    'usr/sbin/mariadbd usr/bin/mariadb usr/bin/my_print_defaults usr/bin/resolveip'
echo "$folder"
