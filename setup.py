"""The one part of recinfer that is compiled; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "recinfer.quant._rows",
            ["recinfer/quant/_rows.c"],
            py_limited_api=True,
            # Without a C compiler the same rows come out of torch's and FBGEMM's operators, slower.
            optional=True,
            # Rounding must stay IEEE's, so no fused multiply-add; the rest lets loops with rintf become vectors.
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-fopenmp-simd",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=off",
            ],
        )
    ]
)
