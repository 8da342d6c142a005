"""FuriosaAI RNGD through the packages furiosa-torch and furiosa-kernels."""
