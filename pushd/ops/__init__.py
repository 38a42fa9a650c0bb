"""pushd.ops"""
