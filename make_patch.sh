#!/usr/bin/env bash
# Privileged mode (-p) ignores functions and shell options of the environment; sh has none of what follows.
case $- in *p*) ;; *) exec bash -p -- "$0" "$@" ;; esac
set +o posix
usage() {
    cat <<'EOF'
Makes patches/gradloc.patch and its checksum from an edited verl checkout.

Usage:
  make_patch.sh --init DIR [--base SRC]
      Prepare a development checkout in the new directory DIR: a git tree with the base commit tagged
      gradloc-base and the patch applied as uncommitted edits. SRC is a verl clone that has the pinned
      commit, a wheel or a plain tree; without it the wheel is downloaded with pip (and kept in build/).
  make_patch.sh --repo DIR [--base REV] [--head REV] [--output FILE] [--force]
      Write the difference between REV (default: the tag gradloc-base, else the pinned commit) and DIR's
      working tree (or --head REV), new files included, to patches/gradloc.patch and .sha256. The project's
      gradloc/ and DIR's verl/utils/gradloc are brought together first: the present patch is their common
      ancestor, a file changed on one side is taken from that side, and one changed on both stops the run.
      With --output FILE, only FILE and FILE.sha256 are written, from DIR as it is.
      --force goes on although the patch has changed since DIR was last brought together with it.
  make_patch.sh --check [--base-tree TREE]
      Check that patches/ is what the sources produce: the checksum matches; the patch applies to the base
      without whitespace errors and reverses to it byte for byte; and regenerating it with the package from
      gradloc/ gives the same bytes. TREE is an unpatched verl tree; without it build/base or the wheel is
      used. If no base can be had, only the checksum and the package are checked, and the exit code is 3.

The package holds Python files only: the .html, .css and .js files of a folder are in it as page_files.py. A README.md in it stays where it is and is not part of the patch.

Exit codes: 0 done, 1 the check failed, 2 usage, 3 refused or failed (one sentence says why).
EOF
}

set -euo pipefail
export LC_ALL=C
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
patch=$root/patches/gradloc.patch
python=${PYTHON:-python3}
package=verl/utils/gradloc

die() { printf 'make_patch.sh: %s\n' "$*" >&2; exit 3; }
misuse() { printf 'make_patch.sh: %s (--help shows the usage)\n' "$*" >&2; exit 2; }
say() { printf 'make_patch.sh: %s\n' "$*"; }

# The verdict of --check; where the disk is full, git's failures say nothing about the patch.
out_of_date() {
    head -c 1000000 /dev/zero 2>/dev/null >"$scratch/probe" || die "the disk of $scratch is full; set TMPDIR to another"
    verdict=1
    printf 'make_patch.sh: %s\n' "$*" >&2
    exit 1
}
read_pin() {
    local file=$root/patches/BASE_COMMIT
    [[ -f $file ]] || die "$file is missing; restore it from version control"
    commit=$(sed -n 's/^COMMIT=//p' "$file")
    version=$(sed -n 's/^VERSION=//p' "$file")
    [[ $commit =~ ^[0-9a-f]{40}$ && $version =~ ^[0-9][0-9A-Za-z.]*$ ]] ||
        die "$file must hold one line COMMIT=<40 hex digits> and one line VERSION=<release>"
}

# A caller's GIT_DIR, GIT_LITERAL_PATHSPECS and the like would change what git does. Where git is, and the user's
# settings, stay: they may say that a tree of another account is safe.
for name in "${!GIT_@}"; do
    [[ $name == GIT_@(EXEC_PATH|CONFIG_*) ]] || unset "$name"
done

# git without the user's settings. The blob hashes of a patch are SHA-1, whatever git makes by default.
plain_git() {
    GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_COUNT=0 GIT_CONFIG_PARAMETERS='' \
        GIT_DEFAULT_HASH=sha1 git -c init.defaultBranch=main "$@"
}

# keep_bytes GIT_DIR: attributes that come before all others, so that git converts nothing there.
keep_bytes() {
    mkdir -p "$1/info"
    echo '* -text !eol !ident !filter !working-tree-encoding !diff !merge !whitespace' >"$1/info/attributes"
}

# git in a scratch repository of our own, so that neither the user's settings nor a checkout's own
# configuration, attributes or excludes can change a byte. $index names the index in use.
g() {
    GIT_DIR=$scratch/repo GIT_INDEX_FILE=$scratch/$index.index plain_git -c core.autocrlf=false \
        -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null -c core.fileMode=true -c core.quotePath=true \
        -c core.whitespace=blank-at-eol,space-before-tab,blank-at-eof "$@"
}

make_scratch() {
    scratch=$(cd "${TMPDIR:-/tmp}" 2>/dev/null && TMPDIR=$PWD mktemp -d 2>/dev/null) ||
        die "no temporary folder can be made in ${TMPDIR:-/tmp}; set TMPDIR to a folder that can be written"
    index=none
    plain_git init -q --template= "$scratch/work"
    mv "$scratch/work/.git" "$scratch/repo"
    keep_bytes "$scratch/repo"
}

# Cleans up. A tool that failed by itself must not look like the verdict of --check.
finish() {
    rm -rf ${scratch:+"$scratch"} ${partial:+"$partial"}
    case $1 in
        0 | 2 | 3 | 130) ;;
        *) [[ -n $verdict ]] || die "stopped by the failure above" ;;
    esac
}

# add_files WORK_TREE PATH: put all files below PATH into $index, whatever .gitignore says, but for what tools leave.
add_files() {
    local left=() name
    for name in '__pycache__/**' '*.py[co]' '*.orig' '*.rej' '*.sw[op]' '*~'; do left+=(":(exclude,glob)**/$name"); done
    (cd "$1" && g --work-tree=. add -A -f -- "$2" "${left[@]}") ||
        die "the files of $1/$2 could not be read"
}

# Prints the tree of the package in $index (the empty tree if there is none).
package_tree() {
    g write-tree --prefix="$package/" 2>/dev/null || g mktree </dev/null
}

# unstage PATHSPEC: out of $index, whatever files of these names the current directory has (-f).
unstage() { g rm -r -f -q --cached --ignore-unmatch -- "$1"; }

# drop_readmes PREFIX: what stays with the sources.
drop_readmes() { unstage ":(glob)$1**/README.md"; }

# inline_pages: in $index, page_files.py stands for the .html, .css and .js files of each folder of gradloc/.
inline_pages() {
    local folder blob
    while read -r folder; do
        blob=$("$python" - "$root/gradloc/$folder" <<'EOF' | g hash-object -w --stdin
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
files = sorted(path for path in folder.iterdir() if path.suffix in (".css", ".html", ".js"))
names = ", ".join(path.name for path in files)
print("# SPDX-FileCopyrightText: 2026 The GradLoc Authors")
print("# SPDX-License-Identifier: Apache-2.0")
print(f"# Generated from {names} of gradloc/{folder.name}/ of the project: edit those.")
print(f'"""The texts of {names}."""\n')
print("FILES: dict[str, str] = {")
for path in files:
    print(f"    {path.name!r}: r'''{path.read_text(encoding='utf-8')}''',".replace(repr(path.name), f'"{path.name}"', 1))
print("}")
EOF
)
        g update-index --add --cacheinfo "100644,$blob,$folder/page_files.py"
        g rm -r -f -q --cached -- ":(glob)$folder/*.css" ":(glob)$folder/*.html" ":(glob)$folder/*.js"
    done < <(g ls-files -- ':(glob)**/*.html' | xargs -r -n 1 dirname | sort -u)
}

# refuse_strays TREE NAME: the package holds Python files only.
refuse_strays() {
    local stray
    stray=$(g ls-tree -r "$1" | awk -F '\t' '$1 !~ /^100/ || $2 !~ /\.py"?$/ { print $2; exit }')
    [[ -z $stray ]] || die "$2/$stray does not belong in the package, which holds Python files only; move it away"
}

# Prints the tree of the project's gradloc/.
project_package() {
    local index=project tree
    if [[ -d $root/gradloc ]]; then
        add_files "$root/gradloc" .
        drop_readmes ''
        inline_pages
    fi
    tree=$(g write-tree)
    refuse_strays "$tree" gradloc
    echo "$tree"
}

replace_package() {
    unstage "$package"
    g read-tree --prefix="$package/" "$1"
}

# write_diff BASE_TREE TREE FILE: every setting that shapes the output is given here.
write_diff() {
    g diff --full-index --no-renames --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/ -U3 \
        --inter-hunk-context=0 --diff-algorithm=histogram --indent-heuristic --no-relative --submodule=short \
        "$1" "$2" >"$3"
}

sha256() { sha256sum <"$1" | cut -d' ' -f1; }

# Refuses what the patch format or CI would not take.
check_content() {
    local base=$1 tree=$2 file=$3 bad
    [[ -s $file ]] || die "nothing differs from the base, so there is no patch to write"
    bad=$(g diff --raw --no-renames "$base" "$tree" | awk -F '\t' '$1 ~ /^:[0-9]+ 1[26]/ { print $2; exit }')
    [[ -z $bad ]] || die "$bad is a symbolic link or a nested repository, which the patch cannot carry"
    bad=$(g diff --raw --no-renames "$base" "$tree" |
        awk -F '\t' '$1 ~ /M$/ && substr($1, 2, 6) != substr($1, 9, 6) { print $2; exit }')
    [[ -z $bad ]] || die "the mode of $bad changed, which the patch cannot carry; undo that with chmod"
    bad=$(sed -n 's/^Binary files \(.*\) differ$/\1/p' "$file" | head -n 1)
    [[ -z $bad ]] || die "a binary file changed ($bad), which the patch cannot carry"
    bad=$(g diff --check "$base" "$tree" | head -n 1) || true
    [[ -z $bad ]] || die "whitespace error in $bad; fix it first"
    bad=$(awk '/^\+\+\+ / { name = substr($0, 7) } /^\\ No newline/ && last ~ /^\+/ { print name; exit }
               { last = $0 }' "$file")
    [[ -z $bad ]] || die "$bad lacks the newline at its end; add it"
    bad=$("$python" -c '
import sys
sys.path.insert(0, sys.argv[1])
import apply_patch
try:
    apply_patch.parse_patch(open(sys.argv[2], "rb").read())
except apply_patch.Stop as stop:
    print(stop)' "$root" "$file") || die "$python cannot run apply_patch.py, to see that it takes the patch"
    [[ -z $bad ]] || die "apply_patch.py would not take the patch: $bad"
}

# Downloads the wheel once into build/. If that fails, $why is what pip said last.
fetch_wheel() {
    wheel=$root/build/wheel/verl-$version-py3-none-any.whl
    [[ -f $wheel ]] && return
    if ! "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary verl -d "$scratch/wheel" \
        "verl==$version" >"$scratch/said" 2>&1; then
        why=$(tail -n 1 "$scratch/said")
        why="verl $version could not be downloaded with pip (${why:-it says nothing})"
        return 1
    fi
    mkdir -p "$root/build/wheel"
    mv "$scratch/wheel/$(basename "$wheel")" "$wheel"
}

# unpack SRC DIR: the verl/ of a wheel or of a plain tree.
unpack() {
    local tree=$1
    mkdir -p "$2"
    if [[ -f $1 ]]; then
        tree=$scratch/unzipped
        "$python" -m zipfile -e "$1" "$tree" >/dev/null 2>&1 || die "$1 is not a wheel that can be unpacked"
    fi
    [[ -f $tree/verl/__init__.py ]] || die "$1 has no verl/__init__.py; give a verl clone, wheel or tree"
    [[ $(cat "$tree/verl/version/version" 2>/dev/null) =~ ^[[:space:]]*"$version"(\.dev[0-9A-Za-z.]*)?[[:space:]]*$ ]] ||
        die "$1 is not verl $version, which the patch is made for"
    cp -R "$tree/verl" "$2/verl"
    find "$2/verl" -name __pycache__ -prune -exec rm -rf {} +
}

# The git folder of a clone, bare or not; fails for anything else.
git_folder() {
    if [[ -e $1/.git ]]; then echo "$1/.git"; else git --git-dir="$1" rev-parse --git-dir 2>/dev/null; fi
}

# Refuses a repository whose objects the scratch repository cannot read.
refuse_sha256() {
    [[ $(git --git-dir="$(git_folder "$1")" rev-parse --show-object-format) != sha256 ]] ||
        die "the objects of $1 are of git's SHA-256 format, but a patch needs SHA-1; use a checkout of that format"
}

init() {
    local target=$1 source=$2 rev status
    if [[ -e $target ]]; then
        [[ -d $target && -z $(ls -A "$target") ]] || die "$target exists already; give a new directory"
        [[ ! $target -ef . ]] || die "the current directory cannot be replaced; go elsewhere and name it from there"
    fi
    mkdir -p "$(dirname "$target")" 2>/dev/null &&
        partial=$(mktemp -d "$(dirname "$target")/.gradloc-init-XXXXXX" 2>/dev/null) ||
        die "$(dirname "$target") cannot be written; give another directory"
    if [[ -n $source && ! -e $source ]]; then
        die "$source does not exist; --base takes a clone, a wheel or a tree"
    elif [[ -n $source ]] && git_folder "$source" >/dev/null; then
        refuse_sha256 "$source"
        rev=$(pinned_revision "$source") || die "$source has neither commit $commit nor a tag gradloc-base"
        git clone -q --no-checkout --template= "$source" "$partial/tree" 2>"$scratch/said" ||
            die "$source could not be cloned: $(tail -n 1 "$scratch/said")"
        keep_bytes "$partial/tree/.git"
        plain_git -C "$partial/tree" -c advice.detachedHead=false checkout -q --detach "$rev" ||
            die "commit $rev of $source could not be checked out"
    else
        if [[ -z $source ]]; then
            say "fetching verl $version"
            fetch_wheel || die "$why; give a clone or wheel with --base"
            source=$wheel
        fi
        unpack "$source" "$partial/tree"
        plain_git init -q --template= "$partial/tree"
        keep_bytes "$partial/tree/.git"
        printf '__pycache__/\n*.py[co]\n' >"$partial/tree/.git/info/exclude"
        plain_git -C "$partial/tree" add -A -f
        # A fixed author and date: the commit is the same everywhere.
        GIT_AUTHOR_NAME=verl GIT_AUTHOR_EMAIL=verl@localhost GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' \
            GIT_COMMITTER_NAME=verl GIT_COMMITTER_EMAIL=verl@localhost GIT_COMMITTER_DATE='2026-01-01T00:00:00Z' \
            plain_git -C "$partial/tree" commit -q -m "verl $version (upstream $commit)"
    fi
    plain_git -C "$partial/tree" config core.autocrlf false
    plain_git -C "$partial/tree" tag -f gradloc-base >/dev/null
    if [[ -f $patch ]]; then
        status=0
        "$python" "$root/apply_patch.py" --check --repo "$partial/tree" >"$scratch/said" 2>&1 || status=$?
        [[ $status == 0 ]] || die "the patch does not apply to this base: $(tail -n 1 "$scratch/said")"
        "$python" "$root/apply_patch.py" --repo "$partial/tree" >/dev/null || die "the patch could not be applied"
        remember "$partial/tree" "$patch"
    fi
    mv -T "$partial/tree" "$target" 2>/dev/null || die "$target cannot be replaced; give a new directory"
    say "$target is ready: edit it, then run make_patch.sh --repo $target"
}

# The revision of REPO that stands for the base.
pinned_revision() {
    local folder
    folder=$(git_folder "$1")
    git --git-dir="$folder" rev-parse -q --verify "refs/tags/gradloc-base^{commit}" 2>/dev/null ||
        git --git-dir="$folder" rev-parse -q --verify "$commit^{commit}" 2>/dev/null
}

git_dir_of() { git -C "$1" rev-parse --absolute-git-dir; }

# remember REPO FILE: the patch that this checkout was last brought together with.
remember() { sha256 "$2" >"$(git_dir_of "$1")/gradloc-patch.sha256"; }

# lock FILE PLACE: no other run changes PLACE until this one ends.
lock() {
    local descriptor
    [[ -w $1 ]] || die "$2 cannot be written; use an account that may"
    exec {descriptor}<>"$1"
    flock -n "$descriptor" || die "another make_patch.sh is at work on $2; wait until it has ended"
}

regenerate() {
    local repo=$1 base=$2 head=$3 output=$4 edited top rev base_tree ancestor ours theirs merged final outside synced file
    [[ -d $repo ]] || die "$repo is not a directory; --repo takes a verl checkout"
    repo=$(cd "$repo" && pwd -P)
    top=$(git -C "$repo" rev-parse --show-toplevel 2>"$scratch/said") ||
        die "$repo is not a usable git checkout: $(head -n 1 "$scratch/said")"
    [[ $(cd "$top" && pwd -P) == "$repo" ]] ||
        die "$repo lies inside the repository $top; give the top of a verl checkout"
    refuse_sha256 "$repo"
    if [[ -n $base ]]; then
        rev=$(git -C "$repo" rev-parse -q --verify "$base^{commit}") || die "$base is not a revision of $repo"
    else
        rev=$(pinned_revision "$repo") ||
            die "$repo has neither a tag gradloc-base nor commit $commit; name the base with --base"
    fi
    git -C "$repo" rev-parse -q --verify "$rev:verl" >/dev/null || die "$rev of $repo has no directory verl"
    [[ -z $head ]] || edited=$(git -C "$repo" rev-parse -q --verify "$head^{commit}") ||
        die "$head is not a revision of $repo"
    outside=$(git -C "$repo" diff --name-only "$rev" ${head:+"$edited"} -- . ':(exclude,top)verl' | head -n 1)
    [[ -z $outside ]] || die "$outside differs from the base, but the patch changes nothing outside verl/; undo that"
    outside=$(git -C "$repo" ls-files --others --exclude-standard -- . ':(exclude,top)verl' | head -n 1)
    [[ -z $outside ]] || say "note: $outside and other new files outside verl/ are not part of the patch"

    if [[ -z $output ]]; then
        lock "$root/patches/BASE_COMMIT" "$root"
        lock "$(git_dir_of "$repo")/HEAD" "$repo"
    fi
    (cd "$repo" && cd "$(git rev-parse --git-path objects)" && pwd) >"$scratch/repo/objects/info/alternates"
    index=base
    g read-tree --empty
    g read-tree --prefix=verl/ "$rev:verl"
    base_tree=$(g write-tree)
    index=edited
    g read-tree "$base_tree"
    if [[ -n $head ]]; then
        g read-tree --empty
        g read-tree --prefix=verl/ "$edited:verl"
    else
        [[ -d $repo/verl ]] || die "$repo has no directory verl"
        add_files "$repo" verl
    fi
    drop_readmes "$package/"

    if [[ -z $output ]]; then
        theirs=$(package_tree)
        ours=$(project_package)
        ancestor=$(g mktree </dev/null)
        if [[ -f $patch ]]; then
            index=ancestor
            g read-tree "$base_tree"
            # The package alone: the hooks may be written for another base.
            g apply --cached --include="$package/*" "$patch" 2>"$scratch/said" ||
                die "the present $patch cannot be read ($(head -n 1 "$scratch/said")); restore it"
            ancestor=$(package_tree)
        fi
        # An empty side is a checkout without the patch, or half a clone: not a wish to delete the package.
        if [[ -n $(g ls-tree "$ancestor") ]]; then
            [[ -n $(g ls-tree "$theirs") ]] || die "$repo has no $package; apply the patch to it first (apply_patch.py)"
            [[ -n $(g ls-tree "$ours") ]] || die "the project's gradloc/ is empty; restore it from version control"
        fi
        index=merge
        g read-tree --empty
        g read-tree -m -i --aggressive "$ancestor" "$theirs" "$ours"
        file=$(g ls-files -u | cut -f 2 | uniq | paste -s -d ' ')
        [[ -z $file ]] || die "changed both in gradloc/ and in $repo/$package: $file; make both the same, then run again"
        merged=$(g write-tree)
        refuse_strays "$merged" "$package"
        [[ -z $head || $merged == "$theirs" ]] ||
            die "gradloc/ has changes that $head lacks; leave out --head, or write to another file with --output"
        index=edited
        [[ -z $(g ls-tree "$merged") && -z $(g ls-tree "$theirs") ]] || replace_package "$merged"
    fi
    index=edited
    final=$(g write-tree)
    write_diff "$base_tree" "$final" "$scratch/new.patch"
    check_content "$base_tree" "$final" "$scratch/new.patch"

    if [[ -z $output ]]; then
        synced=$(cat "$(git_dir_of "$repo")/gradloc-patch.sha256" 2>/dev/null) || true
        if [[ -z $force && -n $synced && -f $patch && $synced != "$(sha256 "$patch")" ]] &&
            ! cmp -s "$scratch/new.patch" "$patch"; then
            die "the patch has changed since $repo was last brought together with it, and those changes would be lost;" \
                "make a new checkout with --init and redo your edits there, or pass --force"
        fi
        # The patch comes last: it is the common ancestor, so an interrupted run can simply be repeated.
        update_package "$merged" "$ours" "$root/gradloc"
        [[ -n $head ]] || update_package "$merged" "$theirs" "$repo/$package"
        output=$patch
        write_outputs "$output"
        remember "$repo" "$output"
    else
        write_outputs "$output"
    fi
    g diff --stat --no-color --no-renames "$base_tree" "$final" | tail -n 1
    say "wrote $output and its .sha256"
}

# update_package NEW OLD DIR: bring DIR's files from tree OLD to tree NEW.
update_package() {
    local mode status name
    while IFS=$'\t' read -r mode name; do
        status=${mode##* }
        if [[ $status == D ]]; then
            rm -f "$3/$name"
            (cd "$3" && rmdir -p --ignore-fail-on-non-empty "$(dirname "$name")") 2>/dev/null || true # . is left
            say "removed $3/$name"
        else
            mkdir -p "$(dirname "$3/$name")"
            partial=$3/$name.tmp
            g cat-file blob "$1:$name" >"$partial"
            mv "$3/$name.tmp" "$3/$name"
            say "updated $3/$name"
        fi
    done < <(g -c core.quotePath=false diff --raw --no-renames "$2" "$1")
}

write_outputs() {
    [[ -d $(dirname "$1") && ! -d $1 ]] || die "$1 is not a file in an existing directory"
    partial=$1.tmp
    cp "$scratch/new.patch" "$1.tmp"
    printf '%s  %s\n' "$(sha256 "$1.tmp")" "$(basename "$1")" >"$1.sha256.tmp"
    mv "$1.tmp" "$1"
    mv "$1.sha256.tmp" "$1.sha256"
}

check() {
    local tree=$1 base_tree ours patched rebuilt changed
    [[ -s $patch ]] || out_of_date "$patch is missing or empty; run make_patch.sh --repo on a development checkout"
    [[ $(cat "$patch.sha256" 2>/dev/null) == "$(sha256 "$patch")  gradloc.patch" ]] ||
        out_of_date "$patch.sha256 is not the checksum of the patch; regenerate both with make_patch.sh --repo"
    ours=$(project_package)
    if [[ -n $tree ]]; then
        [[ -f $tree/verl/__init__.py ]] || die "$tree has no verl/__init__.py; --base-tree takes an unpatched verl tree"
    elif [[ -d $root/build/base/verl ]]; then
        tree=$root/build/base
    elif fetch_wheel; then
        unpack "$wheel" "$scratch/base"
        tree=$scratch/base
    fi
    index=check
    g read-tree --empty
    if [[ -z $tree ]]; then
        g apply --cached --include="$package/*" "$patch" 2>"$scratch/said" ||
            out_of_date "the patch cannot be read: $(head -n 1 "$scratch/said")"
        changed=$(g diff --name-only --no-renames "$(package_tree)" "$ours" | paste -s -d ' ')
        [[ -z $changed ]] || out_of_date "the patch's package is not gradloc/ ($changed differ); run make_patch.sh --repo"
        die "checksum and package are right, but the rest cannot be checked: $why; give a tree with --base-tree"
    fi
    add_files "$tree" verl
    base_tree=$(g write-tree)
    g apply --cached --whitespace=error-all "$patch" 2>"$scratch/said" ||
        out_of_date "the patch does not apply to $tree: $(head -n 1 "$scratch/said")"
    patched=$(g write-tree)
    replace_package "$ours"
    rebuilt=$(g write-tree)
    changed=$(g diff --name-only --no-renames "$patched" "$rebuilt" | paste -s -d ' ')
    [[ -z $changed ]] || out_of_date "the patch's package is not gradloc/ ($changed differ); run make_patch.sh --repo"
    write_diff "$base_tree" "$rebuilt" "$scratch/new.patch"
    cmp -s "$scratch/new.patch" "$patch" ||
        out_of_date "the patch says the same as the sources but in other bytes; it was not written by make_patch.sh --repo"
    g apply --cached -R "$patch" 2>"$scratch/said" && [[ $(g write-tree) == "$base_tree" ]] ||
        out_of_date "the patch does not reverse to the base byte for byte"
    say "patches/ is what the sources produce; it applies to the base and reverses to it"
}

verdict='' scratch='' partial='' action='' target='' base='' head='' output='' base_tree='' force=''
set_action() { [[ -z $action ]] || misuse "give one of --init, --repo and --check"; action=$1; }
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --check) set_action check; shift; continue ;;
        --force) force=1; shift; continue ;;
        --init | --repo | --base | --head | --output | --base-tree) ;;
        *) misuse "unknown argument: $1" ;;
    esac
    [[ -n ${2:-} ]] || misuse "$1 needs a value"
    case $1 in
        --init | --repo) set_action "${1#--}"; target=$2 ;;
        --base) base=$2 ;;
        --head) head=$2 ;;
        --output) output=$2 ;;
        --base-tree) base_tree=$2 ;;
    esac
    shift 2
done
[[ -n $action ]] || misuse "give one of --init, --repo and --check"
[[ $action == repo || -z $head$output$force ]] || misuse "--head, --output and --force belong to --repo"
[[ $action != check || -z $base ]] || misuse "--base does not belong to --check; it takes --base-tree"
[[ $action == check || -z $base_tree ]] || misuse "--base-tree belongs to --check"
trap 'finish $?' EXIT
trap 'exit 130' INT TERM HUP
for name in git flock; do
    command -v "$name" >/dev/null || die "$name is not on PATH; install it"
done
read_pin
make_scratch
case $action in
    init) init "${target%/}" "$base" ;;
    repo) regenerate "$target" "$base" "$head" "$output" ;;
    check) check "$base_tree" ;;
esac
