"""The native kernels for AVX-512 on a processor without it: under Bochs, a whole computer in software.

`products.cpp` compares products of any shape with plain loops, and `native_driver.cpp` runs every kernel, with one
thread and with three, and compares what both give. Says whether they are right, not how fast: an hour for all levels.

    python benchmarks/emulated.py --bochs "bochs" --kernel vmlinuz [--levels avx512,avx512_bf16]

Bochs 3.0 is known to work (2.7 and 3.1 do not). The kernel is that of Debian's linux-image-cloud-amd64. Further needs
g++, and Debian's isolinux, syslinux-common, xorriso, bochsbios and vgabios. AMX is not run: Bochs has no XFD, without
which Linux does not offer it.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from mainspring.kernels.native import build as native_build
from report import ROOT

ADDED = {"avx512": "", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512vnni avx512bf16"}
"""A level, perhaps with an optional feature → what its processor has more than a Skylake-X."""
FLAGS = [
    *(flag for flag in native_build.FLAGS if flag not in ("-O3", "-fopenmp", "-fPIC")),
    "-O1",
    "-static",
    "-pthread",
]
DRIVER = ("native_driver", "decoder", "products", "weights")
FOUND = ("all passed", "all kernels ran: ")  # the last words of the programs
LIMIT_S = 3_600
INIT = r"""
#include <cstdio>
#include <initializer_list>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <unistd.h>
int main() {
    for (const char* program : {"/products", "/driver"}) {
        if (fork() == 0) execl(program, program, nullptr);
        int status = -1;
        wait(&status);
        std::printf("%s ended with %d\n", program, status), std::fflush(stdout);
    }
    std::puts("THE END"), std::fflush(stdout), sleep(1), reboot(RB_POWER_OFF);
}
"""
BOOT = """default all
prompt 0
label all
 kernel vmlinuz
 append initrd=initrd.gz console=ttyS0 hpet=disable nosmp noapic mitigations=off nokaslr quiet
"""
MACHINE = """cpu: model=corei7_skylake_x{added}, ips=100000000, ignore_bad_msrs=1
memory: guest=1024, host=1024
romimage: file={bios}/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path={folder}/all.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/console
display_library: rfb, options="timeout=0"
log: {folder}/log
"""


def build(level: str, folder: Path) -> None:
    """Compile the programs for this level."""
    (found,) = [one for one in native_build.LEVELS if one.name == level.removesuffix("_vnni")]
    flags = [*FLAGS, *found.flags, *(["-mavx512vnni"] if level != "avx512" else []), "-DMAINSPRING_STD_THREADS"]
    (folder / "init.cpp").write_text(INIT)
    sources = [native_build.SOURCES / f"{name}.cpp" for name in DRIVER]
    for name, files in (
        ("driver", sources),
        ("products", [ROOT / "benchmarks" / "products.cpp"]),
        ("init", [folder / "init.cpp"]),
    ):
        subprocess.run(["g++", *flags, *files, "-o", folder / name], check=True)


def archive(files: Iterable[Path]) -> bytes:
    """A cpio archive of these programs and the console, as the kernel reads it."""
    entries = [(f"{file.name}", stat.S_IFREG | 0o755, 0, 0, file.read_bytes()) for file in files]
    entries += [("dev", stat.S_IFDIR | 0o755, 0, 0, b""), ("dev/console", stat.S_IFCHR | 0o600, 5, 1, b"")]
    made = b""
    for i, (name, mode, major, minor, content) in enumerate([*entries, ("TRAILER!!!", 0, 0, 0, b"")]):
        words = (i + 1, mode, 0, 0, 1, 0, len(content), 0, 0, major, minor, len(name) + 1, 0)
        for part in (b"070701" + b"".join(b"%08x" % word for word in words) + name.encode() + b"\0", content):
            made += part + bytes(-(len(made) + len(part)) % 4)
    return made


def run(bochs: list[str], bios: Path, kernel: Path, level: str, folder: Path) -> bool:
    """Make a disk that runs the programs, and start a computer from it. → Whether both programs passed."""
    build(level, folder)
    disk = folder / "disk"
    disk.mkdir()
    (disk / "initrd.gz").write_bytes(
        gzip.compress(archive(folder / name for name in ("init", "products", "driver")), 1)
    )
    (disk / "isolinux.cfg").write_text(BOOT)
    shutil.copy(kernel, disk / "vmlinuz")
    shutil.copy("/usr/lib/ISOLINUX/isolinux.bin", disk)
    shutil.copy("/usr/lib/syslinux/modules/bios/ldlinux.c32", disk)
    how = "-quiet -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table".split()
    subprocess.run(["xorriso", "-as", "mkisofs", *how, "-o", folder / "all.iso", disk], check=True)
    added = f', add_features="{ADDED[level]}"' if ADDED[level] else ""
    (folder / "machine").write_text(MACHINE.format(added=added, folder=folder, bios=bios))
    console, begin = folder / "console", time.monotonic()
    machine = subprocess.Popen(
        [*bochs, "-q", "-f", folder / "machine", "-rc", os.devnull],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    text = ""
    while time.monotonic() - begin < LIMIT_S and machine.poll() is None and "THE END" not in text:
        time.sleep(1)
        text = console.read_text(errors="replace") if console.exists() else ""
    machine.kill()
    machine.wait()
    lines = [line for line in text.splitlines() if not line.startswith("[")]
    print(f"{level}, {time.monotonic() - begin:.0f} s:", *lines[-20:], sep="\n  ", flush=True)
    return all(words in text for words in FOUND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bochs", type=shlex.split, default=["bochs"], help="the command")
    parser.add_argument("--bios", type=Path, default=Path("/usr/share/bochs"), help="folder of Bochs' BIOS")
    parser.add_argument("--kernel", type=Path, required=True)
    parser.add_argument("--levels", default=",".join(ADDED))
    args = parser.parse_args()
    right = True
    for level in args.levels.split(","):
        with tempfile.TemporaryDirectory() as folder:
            right &= run(args.bochs, args.bios, args.kernel, level, Path(folder))
    sys.exit(not right)


if __name__ == "__main__":
    main()
