//! Compiles the sources that are modelled with loom's threads in place of the standard library's.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rustc-cfg=loom");
}
