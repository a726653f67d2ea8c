"""The FP32 network: conversion of the user's file to ONNX, checks, and the cache."""
