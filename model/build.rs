//! Sets `cfg(loom)`, with which the modelled sources use loom's threads instead of the standard library's.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rustc-cfg=loom");
}
