"""pushd.channels"""
