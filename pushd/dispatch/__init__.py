"""pushd.dispatch"""
