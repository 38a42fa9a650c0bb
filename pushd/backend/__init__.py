"""pushd.backend"""
