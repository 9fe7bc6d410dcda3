"""The parts of recinfer that are compiled; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

ROWS = ["recinfer/quant/_half.h", "recinfer/quant/_bags.h", "recinfer/quant/_row.h"]
# Rounding must stay IEEE's, so no fused multiply-add that nobody asked for; the rest lets loops with rintf become vectors.
FLAGS = ["-O3", "-std=gnu11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]


def extension(name: str, *headers: str) -> Extension:
    """One source file. Without a C compiler its work is done by torch's and FBGEMM's operators, slower."""
    folder, _, module = name.rpartition("/")
    return Extension(
        f"recinfer.{folder.replace('/', '.')}.{module}",
        [f"recinfer/{name}.c"],
        depends=list(headers),
        py_limited_api=True,
        optional=True,
        extra_compile_args=FLAGS,
    )


setup(
    ext_modules=[
        extension("quant/_rows", "recinfer/quant/_half.h"),
        extension("quant/_tables", *ROWS),
        extension("serving/_ranks", *ROWS, "recinfer/serving/_reader.h"),
        extension("serving/_wire", "recinfer/serving/_reader.h"),
    ]
)
