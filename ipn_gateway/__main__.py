"""`python -m ipn_gateway` is the command `ipn-gateway`."""

from ipn_gateway.cli import main

if __name__ == "__main__":
    main()
