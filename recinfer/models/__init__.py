"""Reference models: DLRM, DLRM_DCN and DLRM_Projection."""
