"""pushd.core"""
